// What is built from vectors: folds over lanes in one fixed tree, the exponential, scalar forms.
#pragma once

INLINE int lesser(int a, int b) { return a < b ? a : b; }

INLINE float fold_sum(const float* l) {
  float q[4];
  for (int i = 0; i < 4; i++) q[i] = (l[i] + l[i + 8]) + (l[i + 4] + l[i + 12]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
INLINE float nan_max(float a, float b) { return a > b || a != a ? a : b; }
INLINE float nan_min(float a, float b) { return a < b || a != a ? a : b; }
INLINE int32_t nan_max(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t nan_min(int32_t a, int32_t b) { return a < b ? a : b; }
template <class T> INLINE T fold_max(const T* l) {
  T best = l[0];
  for (int i = 1; i < 16; i++) best = nan_max(best, l[i]);
  return best;
}
template <class T> INLINE T fold_min(const T* l) {
  T best = l[0];
  for (int i = 1; i < 16; i++) best = nan_min(best, l[i]);
  return best;
}
#if WITH_PLAIN
INLINE float v_sum(vf v) { return fold_sum(v.l); }
INLINE float v_top(vf v) { return fold_max(v.l); }
#else
INLINE float v_sum(vf v) {
  __m256 h = _mm256_add_ps(v_half(v, 0), v_half(v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE float v_top(vf v) {
  __m256 h = _mm256_max_ps(v_half(v, 0), v_half(v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
#endif

template <int R, int B> INLINE void clear(vf (&acc)[R][B]) {
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int b = 0; b < B; b++) acc[r][b] = v_set(0);
}

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts), then a minimax polynomial in r.
// Below -87.3 and above 88.37 the argument is held at the limit; NaN stays NaN (the order of the
// operands of min and max matters for that).
#define EXP_LOW -87.33654f
#define EXP_HIGH 88.37f
#define EXP_LN2_HIGH -0.693145751953125f
#define EXP_LN2_LOW -1.42860682030941723e-6f
INLINE vf v_exp(vf x) {
  x = v_min(v_set(EXP_HIGH), v_max(v_set(EXP_LOW), x));
  vi n = v_round(v_mul(x, v_set(1.44269504088896341f)));
  vf f = v_float(n);
  vf r = v_fma(f, v_set(EXP_LN2_LOW), v_fma(f, v_set(EXP_LN2_HIGH), x));
  vf p = v_fma(v_set(1.9875691500e-4f), r, v_set(1.3981999507e-3f));
  p = v_fma(p, r, v_set(8.3334519073e-3f));
  p = v_fma(p, r, v_set(4.1665795894e-2f));
  p = v_fma(p, r, v_set(1.6666665459e-1f));
  p = v_fma(p, r, v_set(5.0000001201e-1f));
  p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.0f)));
  return v_mul(p, v_pow2(n));
}
// The same polynomial on one number, in a form that a loop over numbers vectorises; keeps NaN.
INLINE float e_to(float x) {
  float held = x < EXP_LOW ? EXP_LOW : x > EXP_HIGH ? EXP_HIGH : x;
  float shifted = held * 1.44269504088896341f + 12582912.0f;
  float f = shifted - 12582912.0f;
  float r = __builtin_fmaf(f, EXP_LN2_LOW, __builtin_fmaf(f, EXP_LN2_HIGH, held));
  float p = __builtin_fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r + 1.0f);
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  bits = (int32_t)((uint32_t)(bits + 127) << 23);
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}
INLINE float sigmoid(float x) { return 1.0f / (1.0f + e_to(-x)); }
INLINE float inverse_root(float x) { return 1.0f / sqrtf(x); }

INLINE float from_bf16(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t to_bf16(float f) {  // nearest even
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}
#if WITH_PLAIN
INLINE float from_f16(uint16_t h) { return plain_f16(h); }
INLINE uint16_t to_f16(float f) { return plain_to_f16(f); }
#else
INLINE float from_f16(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t to_f16(float f) { return _cvtss_sh(f, 0); }
#endif
INLINE float as_bf16(float f) { return from_bf16(to_bf16(f)); }
INLINE float as_f16(float f) { return from_f16(to_f16(f)); }
