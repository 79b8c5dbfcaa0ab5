// Threads that live across launches. They meet at spinning barriers inside a step and sleep when
// no step has come for a while.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#define RELAX() _mm_pause()
#else
#define RELAX() std::this_thread::yield()
#endif

// Weights that a lane reads in the launches to come: asked for, line by line, while it waits or
// computes what leaves memory idle.
struct alignas(64) Coming {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;

  // Asks for `lines` lines of 64 bytes; false if all have been asked for.
  bool ask(int lines) {
    const uint8_t* last = lines < (end - at) / 64 ? at + lines * 64 : end;
    if (at == last) return false;
    for (; at < last; at += 64) __builtin_prefetch(at, 0, 2);
    return true;
  }
};

struct Team;
// A program over its buffers: the weights that it streams first, in order, and the program that ran
// after it the last time. Steps of a text repeat, so threads that wait for the next program ask for
// what it reads.
struct Program {
  typedef void (*Step)(Team&, int lane, void* argument);
  static constexpr size_t MOST = 12 << 20;  // bytes to ask for: a part of the cache that all share
  Step step;
  std::vector<Coming> reads;
  const Program* next = nullptr;
};

struct Team {
  const int size;
  std::unique_ptr<Coming[]> coming;  // of each lane
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<unsigned> phase{0};
  alignas(64) std::atomic<int> tickets[2]{};
  alignas(64) std::atomic<unsigned> epoch{0};
  std::atomic<int> sleepers{0};
  std::atomic<bool> over{false};
  std::map<std::pair<void* const*, Program::Step>, Program> programs;
  Program* last = nullptr;  // the program that runs, or ran last
  void* argument = nullptr;
  std::mutex gate;
  std::condition_variable bell;
  std::vector<std::thread> threads;

  explicit Team(int n) : size(n), coming(new Coming[n]) {
    for (int lane = 1; lane < n; lane++) threads.emplace_back([this, lane] { serve(lane); });
  }
  ~Team() {
    over = true;
    ring();
    for (auto& t : threads) t.join();
  }

  // The program that runs `step` over `buffers`; `list` fills in its reads when it is new.
  template <class List> Program& program(void* const* buffers, Program::Step step, List list) {
    auto [place, fresh] = programs.try_emplace({buffers, step});
    Program& p = place->second;
    if (fresh) {
      p.step = step;
      list(p);
    }
    return p;
  }

  // Runs the program on every lane; the caller is lane 0. Returns when all lanes have finished.
  void run(Program& p, void* a) {
    if (last) last->next = &p;
    last = &p;
    argument = a;
    ring();
    p.step(*this, 0, a);
    barrier(0);
  }

  // No lane passes before all have come. The last one also empties the tickets of the launch that
  // just ended, which nobody draws from any more.
  void barrier(int lane) {
    unsigned now = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived.store(0, std::memory_order_relaxed);
      tickets[now & 1].store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++)
      if (coming[lane].ask(2)) spins = 0;
      else if (spins < 2000) RELAX();
      else std::this_thread::yield();  // others may need the core
  }

  // The first of `amount` tickets that no other lane has drawn since the last barrier.
  int draw(int amount) {
    unsigned now = phase.load(std::memory_order_relaxed);
    return tickets[now & 1].fetch_add(amount, std::memory_order_relaxed);
  }

 private:
  void ring() {
    epoch.fetch_add(1);
    if (sleepers.load() == 0) return;
    std::lock_guard<std::mutex> hold(gate);
    bell.notify_all();
  }
  void serve(int lane) {
    unsigned seen = 0;
    const Program* next = nullptr;  // what will probably run next
    for (;;) {
      Coming reads;  // the part of what it reads that is asked for now
      size_t part = 0;
      for (int spins = 0; epoch.load(std::memory_order_acquire) == seen; spins++) {
        if (reads.ask(2)) { spins = 0; continue; }
        if (next && part < next->reads.size()) { reads = next->reads[part++]; continue; }
        if (spins < 20000) { RELAX(); continue; }
        std::unique_lock<std::mutex> hold(gate);
        sleepers++;
        bell.wait(hold, [&] { return epoch.load() != seen; });
        sleepers--;
      }
      seen++;
      if (over) return;
      last->step(*this, lane, argument);
      next = last->next;  // before the barrier: after it the next program may begin
      barrier(lane);
    }
  }
};
