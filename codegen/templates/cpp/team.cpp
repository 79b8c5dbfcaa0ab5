// The threads of a process, shared by all programs that are loaded into it.
#include "simd.h"
#include "team.h"

extern "C" Team* team_create(int threads) { return new Team(threads); }
extern "C" void team_destroy(Team* team) { delete team; }
