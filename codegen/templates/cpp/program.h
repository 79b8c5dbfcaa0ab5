// All that a generated unit needs.
#pragma once
#include "simd.h"
#include "lanes.h"
#include "team.h"
#include "products.h"
#include "keys.h"
#include "blocks.h"
#include <chrono>
#include <type_traits>

template <int N> using Count = std::integral_constant<int, N>;
static inline int64_t nanoseconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// The weight that a kernel reads once: its argument, and how many units of how many bytes (0: none).
struct Stream { int argument; size_t unit; int count; };
static constexpr size_t KEPT = 96 * 1024;  // bytes to come that a core's own cache holds beside the rest

// Units that a lane computes in one run, so that its stream of weights goes on; the rest are drawn
// by whoever is free.
INLINE int own_units(int count, int lanes) { return count * 3 / 4 / lanes; }
template <class Run> INLINE void deal(Team& team, int lane, int count, int chunk, Run run) {
  const int own = own_units(count, team.size), dealt = own * team.size;
  run(lane * own, lane * own + own);
  for (int u = dealt + team.draw(chunk); u < count; u = dealt + team.draw(chunk))
    run(u, lesser(u + chunk, count));
}
// Asks memory for the beginning of unit u (S panels, B at a time) while the rows are prepared.
template <class W, int B, int S, int K> INLINE void await_stream(const uint8_t* w, int u) {
  constexpr size_t panel = W::template panel<K>(), begin = W::template head<K>() + AHEAD;
  w += (size_t)u * S * panel;
  for (int b = 0; b < B; b++)
    for (size_t i = 0; i < (begin < panel ? begin : panel); i += 64) fetch<true>(w + b * panel + i);
}
// Unit u (S panels) of R rows, B panels at a time; the weight has PANELS panels in all. ONCE: it is
// read by these rows alone, so memory is asked for it in time.
template <class W, int R, int B, int S, int K, int PANELS, bool ONCE, class Row>
INLINE void multiply(const uint8_t* w, int u, const Row* rows, float (&tile)[R][S * 16]) {
  w += (size_t)u * S * W::template panel<K>();
  for (int s = 0; s < S; s += B) {
    const uint8_t* p = w + s * W::template panel<K>();
    if (PANELS % S == 0 || u * S + s + B <= PANELS) {
      vf acc[R][B];
      W::template tile<R, B, K, ONCE>(p, rows, acc);
      for (int r = 0; r < R; r++)
        for (int c = 0; c < B; c++) v_store(tile[r] + (s + c) * 16, acc[r][c]);
      continue;
    }
    for (int c = s; c < s + B && u * S + c < PANELS; c++, p += W::template panel<K>()) {
      vf acc[R][1];
      W::template tile<R, 1, K, ONCE>(p, rows, acc);
      for (int r = 0; r < R; r++) v_store(tile[r] + c * 16, acc[r][0]);
    }
  }
}
