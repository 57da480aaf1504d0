// Ending threads. A user's callback may run on a thread of this transport and end the group from there.
#pragma once

#include <thread>

namespace minddp::shm {

// Waits for the thread to return; lets it go when it is the calling one.
// REQUIRES: the thread holds a reference to all that it still touches
inline void end_thread(std::thread& thread) {
  if (!thread.joinable()) return;
  thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
}

}  // namespace minddp::shm
