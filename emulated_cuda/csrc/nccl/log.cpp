// See log.hpp.
#include "log.hpp"

#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
std::string environment(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}
std::string host() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  name[strcspn(name, ".")] = 0;
  return name;
}

// A list such as "INIT,COLL", or "^INIT" for all but these. INIT and ENV alone if it is not set.
bool asks_for_calls() {
  std::string level = environment("NCCL_DEBUG");
  if (strcasecmp(level.c_str(), "INFO") && strcasecmp(level.c_str(), "TRACE")) return false;
  std::string areas = environment("NCCL_DEBUG_SUBSYS");
  bool is_inverted = !areas.empty() && areas[0] == '^';
  bool is_named = false;
  for (size_t at = is_inverted; at < areas.size();) {
    size_t end = std::min(areas.find(',', at), areas.size());
    std::string area = areas.substr(at, end - at);
    if (!strcasecmp(area.c_str(), "COLL") || !strcasecmp(area.c_str(), "ALL")) is_named = true;
    at = end + 1;
  }
  return is_named != is_inverted;
}

FILE* opened() {
  std::string path, pattern = environment("NCCL_DEBUG_FILE");
  for (size_t at = 0; at < pattern.size(); ++at) {
    char next = pattern[at] == '%' && at + 1 < pattern.size() ? pattern[at + 1] : 0;
    if (next == 'h') path += host();
    if (next == 'p') path += std::to_string(getpid());
    if (next == '%') path += '%';
    if (next == 'h' || next == 'p' || next == '%') ++at;
    else path += pattern[at];
  }
  FILE* file = path.empty() ? nullptr : fopen(path.c_str(), "w");
  if (file) setlinebuf(file);
  return file ? file : stdout;
}
}  // namespace

void log_call(const Logged& call, Communicator* c, Stream stream) {
  static const bool is_asked_for = asks_for_calls();
  if (!is_asked_for || !c) return;
  static FILE* const file = opened();
  static const std::string name = host();
  fprintf(file,
          "%s:%d:%ld [%d] NCCL INFO %s: opCount %x sendbuff %p recvbuff %p count %zu datatype %d op %d root %d comm %p "
          "[nranks=%d] stream %p\n",
          name.c_str(), getpid(), (long)syscall(SYS_gettid), c->device(), call.name, c->calls_given(), call.send, call.recv,
          call.count, call.type, call.op, call.root, (void*)c, c->ranks(), (void*)stream);
}
