// Ending threads. A user's callback may run on a thread of this transport and end the group from there.
#pragma once

#include <thread>

namespace minddp::shm {

// Waits for the thread to return, or lets it go where a callback runs, on it or beside it: that may wait
// for the caller. REQUIRES: the thread holds a reference to all that it still touches
inline void end_thread(std::thread& thread, bool callback_runs) {
  if (!thread.joinable()) return;
  callback_runs ? thread.detach() : thread.join();
}

}  // namespace minddp::shm
