// Reads `bytes` at `data` with `threads` threads, each its own part, `passes` times; the seconds of the
// fastest pass. Prefetching `ahead` bytes ahead helps some machines, 0 leaves it to the hardware.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

typedef uint64_t Lanes __attribute__((vector_size(64)));

static uint64_t read_part(const char* data, size_t bytes, size_t ahead) {
  Lanes sums[4] = {};
  for (size_t at = 0; at + 256 <= bytes; at += 256)
    for (int i = 0; i < 4; i++) {
      if (ahead) __builtin_prefetch(data + at + 64 * i + ahead);
      Lanes lanes;
      memcpy(&lanes, data + at + 64 * i, 64);
      sums[i] += lanes;
    }
  Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  uint64_t sum = 0;
  for (int i = 0; i < 8; i++) sum += all[i];
  return sum;
}

extern "C" double circuit_read(const char* data, size_t bytes, int threads, size_t ahead, int passes) {
  const size_t part = bytes / threads / 256 * 256;
  std::atomic<int> arrived{0};
  std::atomic<uint64_t> sink{0};
  double best = 1e30;
  auto wait = [&](int goal) {
    while (arrived.load() < goal) std::this_thread::yield();
  };
  auto work = [&](int id) {
    for (int pass = 0; pass < passes; pass++) {
      const int before = 2 * pass * threads;
      if (id == 0) wait(before + threads - 1);  // the clock starts before anyone reads
      auto start = std::chrono::steady_clock::now();
      arrived.fetch_add(1);
      wait(before + threads);
      sink += read_part(data + part * id, part, ahead);
      arrived.fetch_add(1);
      wait(before + 2 * threads);
      std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (id == 0) best = std::min(best, took.count());
    }
  };
  std::vector<std::thread> team;
  for (int id = 1; id < threads; id++) team.emplace_back(work, id);
  work(0);
  for (auto& thread : team) thread.join();
  return best + (sink.load() == 1 ? 1e-12 : 0);
}
