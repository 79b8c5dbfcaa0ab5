// Block formats, computed in place: 32 columns share an f16 scale, rows are rounded to int8 with a
// scale per 32 columns, and the sum of products inside a block is an exact int32.
#pragma once

template <int K> struct alignas(64) Rounded {
  int8_t q[K];
  float scale[K / 32];
  int32_t sum[K / 32];   // of q
  float scaled[K / 32];  // scale * sum
};
template <int K> static inline void round_row(const float* x, Rounded<K>& row) {
  for (int b = 0; b < K / 32; b++) {
    vf low = v_load(x + b * 32), high = v_load(x + b * 32 + 16);
    float top = v_top(v_max(v_abs(low), v_abs(high)));
    float scale = v_any_nan(low, high) ? NAN : top / 127.0f;
    float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    vi a = v_round(v_mul(low, v_set(inverse))), c = v_round(v_mul(high, v_set(inverse)));
    v_store_i8(row.q + b * 32, a);
    v_store_i8(row.q + b * 32 + 16, c);
    row.scale[b] = scale;
    row.sum[b] = (int32_t)v_sum(v_float(v_iadd(a, c)));
    row.scaled[b] = scale * (float)row.sum[b];
  }
}
INLINE int32_t word(const int8_t* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return v;
}

#if WITH_AVX512 && defined(__AVX512VNNI__)
#define WITH_VNNI 1
INLINE vi dot4(vi acc, vi w, const int8_t* x) {  // w unsigned, x signed
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(word(x)));
}
INLINE vi nibbles(vi v, int high) {
  return _mm512_and_si512(high ? _mm512_srli_epi16(v, 4) : v, _mm512_set1_epi8(15));
}
#elif !WITH_PLAIN
INLINE __m256i pairs_to_int(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }
#endif

// R rows x B panels of the block format W: each block's exact sum times both scales and, where
// blocks have a minimum, that minimum times the sum of the row's numbers.
template <class W, int R, int B, int K, bool S>
INLINE void block_tile(const uint8_t* w, const Rounded<K>* x, vf (&acc)[R][B]) {
  clear(acc);
  for (int kb = 0; kb < K / 32; kb++) {
    vi t[R][B];
    bool last = kb >= K / 32 - (int)(AHEAD / W::block);
    W::template sums<R, B, K, S>(w + W::template head<K>() + kb * W::block, x, kb, last, t);
    UNROLL for (int b = 0; b < B; b++) {
      const uint16_t* s = (const uint16_t*)(w + b * W::template panel<K>() + kb * W::scales);
      vf ws = v_f16(s);
      UNROLL for (int r = 0; r < R; r++)
        acc[r][b] = v_fma(v_float(t[r][b]), v_mul(ws, v_set(x[r].scale[kb])), acc[r][b]);
      if (W::minima) {
        vf least = v_f16(s + 16);
        UNROLL for (int r = 0; r < R; r++)
          acc[r][b] = v_fma(least, v_set(x[r].scaled[kb]), acc[r][b]);
      }
    }
  }
}

// Q8_0: panel = scales [K/32][16] f16 padded to 64 bytes, then [K/4][16][4] int8 with the sign bit
// turned over, so that the same bytes serve as unsigned operands (value + 128).
struct Q8_0 {
  template <int K> using Row = Rounded<K>;
  static constexpr size_t scales = 32, block = 512;  // bytes of a panel's blocks of 32 columns
  static constexpr bool minima = false;
  template <int K> static constexpr size_t head() { return (size_t)(K + 63) / 64 * 64; }
  template <int K> static constexpr size_t panel() { return head<K>() + (size_t)K * 16; }
  template <int K> INLINE float at(const uint8_t* w, int64_t n, int64_t k) {
    const uint8_t* p = w + n / 16 * panel<K>();
    int q = (int8_t)(p[head<K>() + k / 4 * 64 + n % 16 * 4 + k % 4] ^ 0x80);
    return (float)q * from_f16(((const uint16_t*)p)[k / 32 * 16 + n % 16]);
  }
  template <int K> INLINE void take(const float* x, Row<K>& row) { round_row<K>(x, row); }

  // Exact sums of one block: R rows x B panels. `p` is the block in the first panel.
  template <int R, int B, int K, bool S>
  INLINE void sums(const uint8_t* p, const Row<K>* x, int kb, bool last, vi (&t)[R][B]) {
    constexpr size_t stride = panel<K>();
    const uint8_t* f = ahead(p, last, (B - 1) * stride);
#if WITH_VNNI
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int b = 0; b < B; b++) t[r][b] = v_int(-128 * x[r].sum[kb]);
    UNROLL for (int g = 0; g < 8; g++) {
      vi wv[B];
      UNROLL for (int b = 0; b < B; b++) {
        wv[b] = v_load_int(p + b * stride + g * 64);
        fetch<S>(f + b * stride + g * 64);
      }
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int b = 0; b < B; b++)
          t[r][b] = dot4(t[r][b], wv[b], x[r].q + kb * 32 + g * 4);
    }
#elif WITH_PLAIN
    for (int r = 0; r < R; r++) for (int b = 0; b < B; b++) for (int i = 0; i < 16; i++) {
      int32_t s = 0;
      for (int k = 0; k < 32; k++)
        s += x[r].q[kb * 32 + k] * (int8_t)(p[b * stride + k / 4 * 64 + i * 4 + k % 4] ^ 0x80);
      t[r][b].l[i] = s;
    }
#else
    // |w| * (x with the sign of w) stays in int16: 2 * 128 * 127 < 2^15. Panels and groups are
    // loops that stay loops, so that the sums of R rows keep the registers.
    _Pragma("GCC unroll 1") for (int b = 0; b < B; b++) {
      __m256i s[R][2];
      UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = _mm256_setzero_si256();
      _Pragma("GCC unroll 1") for (int g = 0; g < 8; g++) {
        const uint8_t* q = p + b * stride + g * 64;
        fetch<S>(f + b * stride + g * 64);
        UNROLL for (int h = 0; h < 2; h++) {
          __m256i w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)q + h),
                                       _mm256_set1_epi8((char)0x80));
          __m256i size = _mm256_abs_epi8(w);
          UNROLL for (int r = 0; r < R; r++) {
            __m256i xb = _mm256_set1_epi32(word(x[r].q + kb * 32 + g * 4));
            s[r][h] = _mm256_add_epi32(
                s[r][h], pairs_to_int(_mm256_maddubs_epi16(size, _mm256_sign_epi8(xb, w))));
          }
        }
      }
      UNROLL for (int r = 0; r < R; r++) t[r][b] = v_ijoined(s[r][0], s[r][1]);
    }
#endif
  }
  template <int R, int B, int K, bool S>
  INLINE void tile(const uint8_t* w, const Row<K>* x, vf (&acc)[R][B]) {
    block_tile<Q8_0, R, B, K, S>(w, x, acc);
  }
};

// Q4_0 and Q4_1: panel = scales [K/32][16] f16 (Q4_1: each block's scales, then its minima) padded
// to 64 bytes, then [K/8][16][4] bytes: column 4g + j in the low and 16 + 4g + j in the high half.
template <bool MINIMA> struct Q4 {
  template <int K> using Row = Rounded<K>;
  static constexpr size_t scales = MINIMA ? 64 : 32, block = 256;
  static constexpr bool minima = MINIMA;
  template <int K> static constexpr size_t head() { return (K / 32 * scales + 63) / 64 * 64; }
  template <int K> static constexpr size_t panel() { return head<K>() + (size_t)K * 8; }
  template <int K> INLINE float at(const uint8_t* w, int64_t n, int64_t k) {
    const uint8_t* p = w + n / 16 * panel<K>();
    int64_t byte = k / 32 * 256 + k % 16 / 4 * 64 + n % 16 * 4 + k % 4;
    int q = k % 32 < 16 ? p[head<K>() + byte] & 15 : p[head<K>() + byte] >> 4;
    const uint16_t* s = (const uint16_t*)(p + k / 32 * scales) + n % 16;
    return MINIMA ? (float)q * from_f16(s[0]) + from_f16(s[16]) : (float)(q - 8) * from_f16(s[0]);
  }
  template <int K> INLINE void take(const float* x, Row<K>& row) { round_row<K>(x, row); }

  template <int R, int B, int K, bool S>
  INLINE void sums(const uint8_t* p, const Row<K>* x, int kb, bool last, vi (&t)[R][B]) {
    constexpr size_t stride = panel<K>();
    const uint8_t* f = ahead(p, last, (B - 1) * stride);
    constexpr int zero = MINIMA ? 0 : -8;
#if WITH_VNNI
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int b = 0; b < B; b++) t[r][b] = v_int(MINIMA ? 0 : zero * x[r].sum[kb]);
    UNROLL for (int g = 0; g < 4; g++) {
      vi low[B], high[B];
      UNROLL for (int b = 0; b < B; b++) {
        vi both = v_load_int(p + b * stride + g * 64);
        low[b] = nibbles(both, 0), high[b] = nibbles(both, 1);
        fetch<S>(f + b * stride + g * 64);
      }
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int b = 0; b < B; b++) {
        t[r][b] = dot4(t[r][b], low[b], x[r].q + kb * 32 + g * 4);
        t[r][b] = dot4(t[r][b], high[b], x[r].q + kb * 32 + 16 + g * 4);
      }
    }
#elif WITH_PLAIN
    for (int r = 0; r < R; r++) for (int b = 0; b < B; b++) for (int i = 0; i < 16; i++) {
      int32_t s = zero * x[r].sum[kb];
      for (int k = 0; k < 16; k++) {
        int both = p[b * stride + k / 4 * 64 + i * 4 + k % 4];
        s += x[r].q[kb * 32 + k] * (both & 15) + x[r].q[kb * 32 + 16 + k] * (both >> 4);
      }
      t[r][b].l[i] = s;
    }
#else
    // a lane sums 16 products below 15 * 127 in int16: at most 30480
    const __m256i mask = _mm256_set1_epi8(15);
    _Pragma("GCC unroll 1") for (int b = 0; b < B; b++) {
      __m256i s[R][2];
      UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = _mm256_setzero_si256();
      _Pragma("GCC unroll 1") for (int g = 0; g < 4; g++) {
        const uint8_t* q = p + b * stride + g * 64;
        fetch<S>(f + b * stride + g * 64);
        UNROLL for (int h = 0; h < 2; h++) {
          __m256i both = _mm256_loadu_si256((const __m256i*)q + h);
          __m256i low = _mm256_and_si256(both, mask);
          __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
          UNROLL for (int r = 0; r < R; r++) {
            const int8_t* xq = x[r].q + kb * 32 + g * 4;
            __m256i a = _mm256_maddubs_epi16(low, _mm256_set1_epi32(word(xq)));
            __m256i c = _mm256_maddubs_epi16(high, _mm256_set1_epi32(word(xq + 16)));
            s[r][h] = _mm256_add_epi16(s[r][h], _mm256_add_epi16(a, c));
          }
        }
      }
      UNROLL for (int r = 0; r < R; r++) {
        __m256i start = _mm256_set1_epi32(MINIMA ? 0 : zero * x[r].sum[kb]);
        t[r][b] = v_ijoined(_mm256_add_epi32(pairs_to_int(s[r][0]), start),
                            _mm256_add_epi32(pairs_to_int(s[r][1]), start));
      }
    }
#endif
  }
  template <int R, int B, int K, bool S>
  INLINE void tile(const uint8_t* w, const Row<K>* x, vf (&acc)[R][B]) {
    block_tile<Q4, R, B, K, S>(w, x, acc);
  }
};
typedef Q4<false> Q4_0;
typedef Q4<true> Q4_1;
