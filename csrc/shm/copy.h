// Copies into memory that another core reads next.
//
// A plain store leaves the line modified in this core's cache. Where the ranks' cores do not share a
// last-level cache (two sockets, two chiplets), the reader fetches each line from there, at a fifth of
// memory's bandwidth on an EPYC; and the store had to take the line away from the reader before. A
// streaming store goes to memory past the caches, and the reader's prefetcher finds it there: on that
// EPYC an allreduce of 32 MB takes 2.9 ms instead of 15 on cores of two chiplets, and 4.6 instead of
// 3.3 on cores of one. Pure: any thread.
#pragma once

#include "copy/streaming.h"

namespace minddp::shm {

// memcpy that accepts nothing from nowhere, and a copy onto itself.
inline void copy(void* destination, const void* source, size_t bytes) {
  if (bytes > 0 && destination != source) std::memcpy(destination, source, bytes);
}

// Below this the caches win: the lines are still on their way when the reader wants them.
constexpr size_t kStreamFrom = size_t{8} << 10;

// copy() to another core.
inline void copy_to_peer(void* destination, const void* source, size_t bytes) {
  bytes < kStreamFrom ? copy(destination, source, bytes) : stream_copy(destination, source, bytes);
}

}  // namespace minddp::shm
