// Products of R rows with B panels of a weight. A panel holds 16 outputs side by side: the lanes
// of a vector are outputs, and each output is one chain of additions over k, whatever R and B.
#pragma once

// Where weights are read once (S), `fetch` asks for a line that the stream reads `AHEAD` bytes
// later; past the end of a panel (`last`) the stream goes on `jump` bytes further.
static constexpr size_t AHEAD = 2048;
INLINE const uint8_t* ahead(const uint8_t* p, bool last, size_t jump) {
  size_t distance = last ? AHEAD + jump : AHEAD;
  __asm__("" : "+r"(distance));  // one register serves all lines of a step
  return p + distance;
}
template <bool S> INLINE void fetch(const uint8_t* p) {
  if (S) __builtin_prefetch(p, 0, 2);
}

// f32: panel [K][16].
struct F32 {
  template <int K> struct Row { float x[K]; };
  template <int K> static constexpr size_t head() { return 0; }
  template <int K> static constexpr size_t panel() { return (size_t)K * 64; }
  template <int K> INLINE float at(const uint8_t* w, int64_t n, int64_t k) {
    return ((const float*)(w + n / 16 * panel<K>()))[k * 16 + n % 16];
  }
  template <int K> INLINE void take(const float* x, Row<K>& row) { memcpy(row.x, x, K * 4); }
  template <int R, int B, int K, bool S>
  INLINE void tile(const uint8_t* w, const Row<K>* x, vf (&acc)[R][B]) {
    clear(acc);
    for (int k = 0; k < K; k++) {
      vf wv[B];
      const uint8_t* p = w + (size_t)k * 64;
      const uint8_t* f = ahead(p, k >= K - (int)(AHEAD / 64), (B - 1) * panel<K>());
      UNROLL for (int b = 0; b < B; b++) {
        wv[b] = v_load((const float*)(p + b * panel<K>()));
        fetch<S>(f + b * panel<K>());
      }
      UNROLL for (int r = 0; r < R; r++) {
        vf xb = v_set(x[r].x[k]);
        UNROLL for (int b = 0; b < B; b++) acc[r][b] = v_fma(wv[b], xb, acc[r][b]);
      }
    }
  }
};

// bf16: panel [K/2][16][2]; rows are rounded to bf16, an odd K is padded with zero.
struct Bf16 {
  template <int K> struct Row { uint16_t x[(K + 1) / 2 * 2]; };
  template <int K> static constexpr size_t head() { return 0; }
  template <int K> static constexpr size_t panel() { return (size_t)((K + 1) / 2) * 64; }
  template <int K> INLINE float at(const uint8_t* w, int64_t n, int64_t k) {
    const uint16_t* p = (const uint16_t*)(w + n / 16 * panel<K>());
    return from_bf16(p[k / 2 * 32 + n % 16 * 2 + k % 2]);
  }
  template <int K> INLINE void take(const float* x, Row<K>& row) {
    for (int k = 0; k < K; k++) row.x[k] = to_bf16(x[k]);
    if (K % 2) row.x[K] = 0;
  }
#if WITH_AVX512 && defined(__AVX512BF16__)
  typedef __m512 Pair;
  INLINE Pair pair(const uint8_t* p) { return _mm512_loadu_ps((const float*)p); }
  INLINE vf dot(vf acc, Pair w, const uint16_t* x) {
    int32_t both;
    memcpy(&both, x, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(both));
  }
#else
  typedef struct { vf first, second; } Pair;
#if WITH_PLAIN
  INLINE Pair pair(const uint8_t* p) {
    Pair o;
    const uint16_t* h = (const uint16_t*)p;
    for (int i = 0; i < 16; i++) {
      o.first.l[i] = from_bf16(h[2 * i]);
      o.second.l[i] = from_bf16(h[2 * i + 1]);
    }
    return o;
  }
#else
  INLINE __m256 low(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  INLINE __m256 high(__m256i v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)));
  }
  INLINE Pair pair(const uint8_t* p) {
    __m256i a = _mm256_loadu_si256((const __m256i*)p);
    __m256i b = _mm256_loadu_si256((const __m256i*)p + 1);
    return {v_joined(low(a), low(b)), v_joined(high(a), high(b))};
  }
#endif
  INLINE vf dot(vf acc, const Pair& w, const uint16_t* x) {
    acc = v_fma(w.second, v_set(from_bf16(x[1])), acc);
    return v_fma(w.first, v_set(from_bf16(x[0])), acc);
  }
#endif
  template <int R, int B, int K, bool S>
  INLINE void tile(const uint8_t* w, const Row<K>* x, vf (&acc)[R][B]) {
    clear(acc);
    constexpr int pairs = (K + 1) / 2;
    for (int k = 0; k < pairs; k++) {
      Pair wv[B];
      const uint8_t* p = w + (size_t)k * 64;
      const uint8_t* f = ahead(p, k >= pairs - (int)(AHEAD / 64), (B - 1) * panel<K>());
      UNROLL for (int b = 0; b < B; b++) {
        wv[b] = pair(p + b * panel<K>());
        fetch<S>(f + b * panel<K>());
      }
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int b = 0; b < B; b++) acc[r][b] = dot(acc[r][b], wv[b], x[r].x + 2 * k);
    }
  }
};
