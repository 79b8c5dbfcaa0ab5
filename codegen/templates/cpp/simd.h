// Vectors of 16 lanes for AVX-512, AVX2 and plain C++. Every form makes the same sequence of
// roundings, except that a fused multiply-add rounds once everywhere.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define WITH_AVX512 1
typedef __m512 vf;
typedef __m512i vi;
INLINE vf v_load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float* p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_set(float a) { return _mm512_set1_ps(a); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
INLINE bool v_any_nan(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }
INLINE vf v_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
INLINE void v_store_f16(uint16_t* p, vf a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, 0));
}
INLINE vf v_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE vf v_float(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi v_round(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vi v_int(int a) { return _mm512_set1_epi32(a); }
INLINE vi v_load_int(const void* p) { return _mm512_loadu_si512(p); }
INLINE vi v_iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vf v_pow2(vi e) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(e, v_int(127)), 23));
}
INLINE void v_store_i8(int8_t* p, vi a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a));
}
INLINE vf v_below(vf a, int n, float fill) {  // lanes from n on become `fill`
  __mmask16 keep = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
  return _mm512_mask_mov_ps(v_set(fill), keep, a);
}
INLINE vf v_joined(__m256 a, __m256 b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
}
INLINE __m256 v_half(vf a, int second) {
  return second ? _mm512_extractf32x8_ps(a, 1) : _mm512_castps512_ps256(a);
}
INLINE vi v_ijoined(__m256i a, __m256i b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
INLINE __m256i v_ihalf(vi a, int second) {
  return second ? _mm512_extracti64x4_epi64(a, 1) : _mm512_castsi512_si256(a);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
#define BOTH(f, x, y) {f((x).a, (y).a), f((x).b, (y).b)}
INLINE vf v_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float* p, vf v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
INLINE vf v_set(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
INLINE vf v_add(vf x, vf y) { return BOTH(_mm256_add_ps, x, y); }
INLINE vf v_sub(vf x, vf y) { return BOTH(_mm256_sub_ps, x, y); }
INLINE vf v_mul(vf x, vf y) { return BOTH(_mm256_mul_ps, x, y); }
INLINE vf v_max(vf x, vf y) { return BOTH(_mm256_max_ps, x, y); }
INLINE vf v_min(vf x, vf y) { return BOTH(_mm256_min_ps, x, y); }
INLINE vf v_fma(vf x, vf y, vf z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE vf v_abs(vf x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE bool v_any_nan(vf x, vf y) {
  __m256 low = _mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), high = _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q);
  return _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0;
}
INLINE vf v_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE void v_store_f16(uint16_t* p, vf v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.a, 0));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.b, 0));
}
INLINE __m256 half_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE vf v_bf16(const uint16_t* p) { return {half_bf16(p), half_bf16(p + 8)}; }
INLINE vf v_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE vi v_round(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE vi v_int(int a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
INLINE vi v_load_int(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE vi v_iadd(vi x, vi y) { return BOTH(_mm256_add_epi32, x, y); }
INLINE __m256 half_pow2(__m256i e) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
}
INLINE vf v_pow2(vi e) { return {half_pow2(e.a), half_pow2(e.b)}; }
INLINE void v_store_i8(int8_t* p, vi v) {
  __m256i s = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
  __m128i low = _mm256_castsi256_si128(s), high = _mm256_extracti128_si256(s, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, high));
}
INLINE vf v_below(vf x, int n, float fill) {
  __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), limit = _mm256_set1_epi32(n);
  __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  __m256 f = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(f, x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, low))),
          _mm256_blendv_ps(f, x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, high)))};
}
INLINE vf v_joined(__m256 a, __m256 b) { return {a, b}; }
INLINE __m256 v_half(vf v, int second) { return second ? v.b : v.a; }
INLINE vi v_ijoined(__m256i a, __m256i b) { return {a, b}; }
INLINE __m256i v_ihalf(vi v, int second) { return second ? v.b : v.a; }

#else
#define WITH_PLAIN 1
typedef struct { float l[16]; } vf;
typedef struct { int32_t l[16]; } vi;
#define LANES(T, e) T o; for (int i = 0; i < 16; i++) o.l[i] = e; return o
INLINE float plain_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, body = h & 0x7fff, u;
  float f = (float)(body & 0x3ff) * 0x1p-24f;
  if (body >= 0x400) {
    u = body >= 0x7c00 ? 0x7f800000 | (body & 0x3ff) << 13 : (body << 13) + 0x38000000;
    memcpy(&f, &u, 4);
  }
  memcpy(&u, &f, 4);
  u |= sign;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t plain_to_f16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint16_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00 | ((u >> 13) & 0x3ff);
  if (u >= 0x477ff000) return sign | 0x7c00;
  if (u < 0x38800000) {
    memcpy(&f, &u, 4);
    return sign | (uint16_t)nearbyintf(f * 0x1p24f);
  }
  return sign | (uint16_t)((u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13);
}
INLINE vf v_load(const float* p) { LANES(vf, p[i]); }
INLINE void v_store(float* p, vf a) { for (int i = 0; i < 16; i++) p[i] = a.l[i]; }
INLINE vf v_set(float a) { LANES(vf, a); }
INLINE vf v_add(vf a, vf b) { LANES(vf, a.l[i] + b.l[i]); }
INLINE vf v_sub(vf a, vf b) { LANES(vf, a.l[i] - b.l[i]); }
INLINE vf v_mul(vf a, vf b) { LANES(vf, a.l[i] * b.l[i]); }
INLINE vf v_max(vf a, vf b) { LANES(vf, a.l[i] > b.l[i] ? a.l[i] : b.l[i]); }
INLINE vf v_min(vf a, vf b) { LANES(vf, a.l[i] < b.l[i] ? a.l[i] : b.l[i]); }
INLINE vf v_fma(vf a, vf b, vf c) { LANES(vf, fmaf(a.l[i], b.l[i], c.l[i])); }
INLINE vf v_abs(vf a) { LANES(vf, fabsf(a.l[i])); }
INLINE bool v_any_nan(vf a, vf b) {
  for (int i = 0; i < 16; i++) if (a.l[i] != a.l[i] || b.l[i] != b.l[i]) return true;
  return false;
}
INLINE vf v_f16(const uint16_t* p) { LANES(vf, plain_f16(p[i])); }
INLINE void v_store_f16(uint16_t* p, vf a) {
  for (int i = 0; i < 16; i++) p[i] = plain_to_f16(a.l[i]);
}
INLINE vf v_bf16(const uint16_t* p) {
  vf o;
  for (int i = 0; i < 16; i++) {
    uint32_t u = (uint32_t)p[i] << 16;
    memcpy(&o.l[i], &u, 4);
  }
  return o;
}
INLINE vf v_float(vi a) { LANES(vf, (float)a.l[i]); }
INLINE vi v_round(vf a) { LANES(vi, (int32_t)nearbyintf(a.l[i])); }
INLINE vi v_int(int a) { LANES(vi, a); }
INLINE vi v_iadd(vi a, vi b) { LANES(vi, a.l[i] + b.l[i]); }
INLINE vf v_pow2(vi e) { LANES(vf, ldexpf(1.0f, e.l[i])); }
INLINE void v_store_i8(int8_t* p, vi a) { for (int i = 0; i < 16; i++) p[i] = (int8_t)a.l[i]; }
INLINE vf v_below(vf a, int n, float fill) { LANES(vf, i < n ? a.l[i] : fill); }
#endif
