// The fake device as it is compiled: most of the time is torch's headers, once for all files.
#include "device.cpp"
#include "group.cpp"
#include "operators.cpp"
