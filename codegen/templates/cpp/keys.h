// Attention over a paged cache [blocks][2][G][16 rows of D], whose keys are turned: a block holds
// them as [D][16]. They are taken 64 at a time from row 0 on: scores have keys in their lanes and
// one chain over d, values have d in their lanes and one chain over keys, so a row's result depends
// on its own length alone.
#pragma once

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
INLINE vf v_cached(const float* p) { return v_load(p); }
INLINE vf v_cached(const f16* p) { return v_f16((const uint16_t*)p); }
INLINE vf v_cached(const bf16* p) { return v_bf16((const uint16_t*)p); }
INLINE float cached(float x) { return x; }
INLINE float cached(f16 x) { return from_f16(x.bits); }
INLINE float cached(bf16 x) { return from_bf16(x.bits); }
INLINE void keep(float* p, float x) { *p = x; }
INLINE void keep(f16* p, float x) { p->bits = to_f16(x); }
INLINE void keep(bf16* p, float x) { p->bits = to_bf16(x); }

#if WITH_AVX512 || WITH_PLAIN
static constexpr bool WIDE_VALUES = true;  // 4 x 4 accumulators fit the registers
#else
static constexpr bool WIDE_VALUES = false;
#endif

template <int D> struct alignas(64) Chunk {  // the keys of 64 rows of the cache, ready for use
  float k[4][D][16];
};
template <int D> struct alignas(64) Head {  // one query head of one row, and what it has seen
  float q[D];
  float acc[(D + 15) / 16 * 16];
  float sum[16];
  float best;
};

// One key-value head of one sequence. A block of it is a short run of memory, so that the
// processor does not foresee the next one: while keys are read, values are asked for, and while
// values are summed, the keys of the chunk after.
template <int G, int D, class T> struct Cached {
  const T* cache;
  const int32_t* table;
  int g, rows;
  const T* keys(int first) const {
    return cache + ((size_t)table[first / 16] * 2 * G + g) * 16 * D;
  }
  const T* values(int first) const { return keys(first) + (size_t)G * 16 * D; }
};
template <class T> INLINE void fetch_row(const T* row, int width) {
  for (size_t i = 0; i < width * sizeof(T); i += 64) fetch<true>((const uint8_t*)row + i);
}
template <int D, class T> INLINE vf v_row(const T* row, int d) {  // zero past the end of the row
  if (d + 16 <= D) return v_cached(row + d);
  float part[16] = {};
  for (int i = 0; d + i < D; i++) part[i] = cached(row[d + i]);
  return v_load(part);
}

static constexpr int ASKED = 4;  // lines of weights to come, for every 4 dimensions of 16 keys
// Reads the keys of rows first .. first + n - 1. Lanes past n hold whatever the block holds.
template <int G, int D, class T>
static void read_keys(const Cached<G, D, T>& cache, int first, int n, Chunk<D>& c,
                      Coming& coming) {
  for (int b = 0; b * 16 < n; b++) {
    const T* k = cache.keys(first + b * 16);
    const T* v = cache.values(first + b * 16);
    for (int d = 0; d < D; d++) {
      v_store(c.k[b][d], v_cached(k + d * 16));
      if (d * 16 * sizeof(T) % 64 == 0) fetch<true>((const uint8_t*)(v + d * 16));
      if (d % 4 == 0) coming.ask(ASKED);
    }
  }
}

// How the rows of a program see the cache. Straight: place j of a sequence is its row j.
struct Straight {
  void begin(int) {}
  template <int G, int D, class T> void fit(const Cached<G, D, T>&, int, int, Chunk<D>&) {}
  template <int G, int D, class T>
  const T* values(const Cached<G, D, T>&, const T* straight, int, int) const { return straight; }
};
// A tree: row i sees the rows before its root as they stand, then its path, root first. Keys of a
// chunk are read straight, and each row mends the few lines where its own path runs elsewhere.
template <int M> struct Tree {
  int root[M], depth[M], path[M][M], start;
  int held[64];  // the row of the cache whose key each line of the chunk holds
  // Adds row i, row `index` of its sequence, and returns the place of the last that it sees: its
  // own. A parent that does not stand before it makes it a root.
  int add(int i, int parent, int index) {
    const bool inner = parent >= 0 && parent < i;
    depth[i] = inner ? depth[parent] + 1 : 0;
    for (int t = 0; t < depth[i]; t++) path[i][t] = path[parent][t];
    path[i][depth[i]] = index < 0 ? 0 : index;
    root[i] = path[i][0];
    return index < 0 ? -1 : root[i] + depth[i];
  }
  void begin(int first) {
    start = first;
    for (int j = 0; j < 64; j++) held[j] = first + j;
  }
  template <int G, int D, class T>
  void fit(const Cached<G, D, T>& cache, int row, int live, Chunk<D>& c) {
    for (int j = root[row] > start ? root[row] - start : 0; j < live; j++) {
      const int wanted = path[row][start + j - root[row]];
      if (held[j] == wanted) continue;
      held[j] = wanted;
      const T* k = cache.keys(wanted) + wanted % 16;
      for (int d = 0; d < D; d++) c.k[j / 16][d][j % 16] = cached(k[d * 16]);
    }
  }
  template <int G, int D, class T>
  const T* values(const Cached<G, D, T>& cache, const T* straight, int row, int place) const {
    if (place < root[row]) return straight;
    const int wanted = path[row][place - root[row]];
    return cache.values(wanted) + wanted % 16 * D;
  }
};

// Weights of n keys (in NB vectors) for H heads: exp(score - best so far), and the factor by which
// what was seen before shrinks.
template <int H, int NB, int D>
INLINE void weigh(const Chunk<D>& c, Head<D>* h, float scale, int n, float (*p)[64],
                  float* shrink) {
  vf s[H][NB];
  clear(s);
  for (int d = 0; d < D; d++) {
    vf k[NB];
    UNROLL for (int b = 0; b < NB; b++) k[b] = v_load(c.k[b][d]);
    UNROLL for (int j = 0; j < H; j++) {
      vf q = v_set(h[j].q[d]);
      UNROLL for (int b = 0; b < NB; b++) s[j][b] = v_fma(k[b], q, s[j][b]);
    }
  }
  const int rest = n - 16 * (NB - 1);
  UNROLL for (int j = 0; j < H; j++) {
    UNROLL for (int b = 0; b < NB; b++) s[j][b] = v_mul(s[j][b], v_set(scale));
    vf top = s[j][NB - 1] = v_below(s[j][NB - 1], rest, -INFINITY);
    UNROLL for (int b = 0; b < NB - 1; b++) top = v_max(top, s[j][b]);
    float best = nan_max(v_top(top), h[j].best);
    shrink[j] = e_to(h[j].best - best);
    vf sum = v_mul(v_load(h[j].sum), v_set(shrink[j]));
    UNROLL for (int b = 0; b < NB; b++) {
      vf e = v_exp(v_sub(s[j][b], v_set(best)));
      if (b == NB - 1) e = v_below(e, rest, 0.0f);
      sum = v_add(sum, e);
      v_store(p[j] + 16 * b, e);
    }
    v_store(h[j].sum, sum);
    h[j].best = best;
  }
}

// Places first .. first + n - 1 for H heads of row `own` of the program.
template <int H, int G, int D, class T, class Lines>
static void take_chunk(const Cached<G, D, T>& cache, const Chunk<D>& c, Head<D>* h, float scale,
                       int first, int n, const Lines& lines, int own) {
  alignas(64) float p[H][64];
  float shrink[H];
  switch ((n + 15) / 16) {
    case 1: weigh<H, 1, D>(c, h, scale, n, p, shrink); break;
    case 2: weigh<H, 2, D>(c, h, scale, n, p, shrink); break;
    case 3: weigh<H, 3, D>(c, h, scale, n, p, shrink); break;
    default: weigh<H, 4, D>(c, h, scale, n, p, shrink);
  }
  constexpr int vectors = (D + 15) / 16;
  constexpr int S = vectors % 4 == 0 && WIDE_VALUES ? 4 : vectors % 2 == 0 ? 2 : 1;
  for (int d = 0; d < vectors * 16; d += S * 16) {
    vf a[H][S];
    UNROLL for (int j = 0; j < H; j++) UNROLL for (int e = 0; e < S; e++)
      a[j][e] = v_mul(v_load(h[j].acc + d + e * 16), v_set(shrink[j]));
    for (int b = 0; b * 16 < n; b++) {
      const T* v = cache.values(first + b * 16);
      const T* ahead = cache.keys(lesser(first + 64 + b * 16, cache.rows - 1));
      for (int i = 0; i < 16 && b * 16 + i < n; i++) {
        fetch_row(ahead + i * D + d, S * 16);
        const T* line = lines.values(cache, v + i * D, own, first + b * 16 + i);
        vf row[S];
        UNROLL for (int e = 0; e < S; e++) row[e] = v_row<D>(line, d + e * 16);
        UNROLL for (int j = 0; j < H; j++) {
          vf w = v_set(p[j][b * 16 + i]);
          UNROLL for (int e = 0; e < S; e++) a[j][e] = v_fma(w, row[e], a[j][e]);
        }
      }
    }
    UNROLL for (int j = 0; j < H; j++) UNROLL for (int e = 0; e < S; e++)
      v_store(h[j].acc + d + e * 16, a[j][e]);
  }
}

constexpr int head_group(int heads) {
  return heads % 4 == 0 ? 4 : heads % 3 == 0 ? 3 : heads % 2 == 0 ? 2 : 1;
}
// Runs `n` rows of one sequence over key-value head g; `heads` [n][HEADS] hold their queries and
// receive their results in `acc`. Row r sees places 0 .. indices[r] (none: zero), and `lines`
// knows it as row `begin` + r.
template <int HEADS, int G, int D, class T, class Lines>
static void attend(const T* cache, const int32_t* table, const int32_t* indices, int n, int g,
                   float scale, Head<D>* heads, Chunk<D>& c, Lines& lines, int begin,
                   Coming& coming) {
  constexpr int H = head_group(HEADS);
  int longest = 0;
  for (int r = 0; r < n; r++) {
    longest = indices[r] + 1 > longest ? indices[r] + 1 : longest;
    for (int j = 0; j < HEADS; j++) {
      Head<D>& h = heads[r * HEADS + j];
      memset(h.acc, 0, sizeof h.acc);
      memset(h.sum, 0, sizeof h.sum);
      h.best = -INFINITY;
    }
  }
  const Cached<G, D, T> cached{cache, table, g, longest};
  for (int first = 0; first < longest; first += 64) {
    read_keys(cached, first, lesser(longest - first, 64), c, coming);
    lines.begin(first);
    for (int r = 0; r < n; r++) {
      int live = indices[r] + 1 - first;
      if (live <= 0) continue;
      live = lesser(live, 64);
      lines.fit(cached, begin + r, live, c);
      for (int j = 0; j < HEADS; j += H)
        take_chunk<H>(cached, c, heads + r * HEADS + j, scale, first, live, lines, begin + r);
    }
  }
  for (int i = 0; i < n * HEADS; i++) {
    float whole = v_sum(v_load(heads[i].sum));
    float inverse = indices[i / HEADS] < 0 ? 0.0f : 1.0f / whole;
    for (int d = 0; d < D; d++) heads[i].acc[d] *= inverse;
  }
}
