// See log.hpp.
#include "log.hpp"

#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
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

// A list such as "INIT,COLL", or "^INIT" for all but these.
bool asks_for(const char* wanted) {
  std::string level = environment("NCCL_DEBUG");
  if (strcasecmp(level.c_str(), "INFO") && strcasecmp(level.c_str(), "TRACE")) return false;
  std::string areas = environment("NCCL_DEBUG_SUBSYS");
  if (areas.empty()) areas = "INIT,BOOTSTRAP,ENV";
  bool is_inverted = areas[0] == '^';
  bool is_named = false;
  for (size_t at = is_inverted; at < areas.size();) {
    size_t end = std::min(areas.find(',', at), areas.size());
    std::string area = areas.substr(at, end - at);
    if (!strcasecmp(area.c_str(), wanted) || !strcasecmp(area.c_str(), "ALL")) is_named = true;
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

// A line begins with the host, the process, its thread and the device.
void write_line(int device, const std::string& text) {
  static FILE* const file = opened();
  static const std::string name = host();
  fprintf(file, "%s:%d:%ld [%d] NCCL INFO %s\n", name.c_str(), getpid(), (long)syscall(SYS_gettid), device, text.c_str());
}
}  // namespace

void log_call(const Logged& call, Communicator* c, Stream stream) {
  static const bool is_asked_for = asks_for("COLL");
  if (!is_asked_for || !c) return;
  char text[400];
  snprintf(text, sizeof text,
           "%s: opCount %x sendbuff %p recvbuff %p count %zu datatype %d op %d root %d comm %p [nranks=%d] stream %p",
           call.name, c->calls_given(), call.send, call.recv, call.count, call.type, call.op, call.root, (void*)c, c->ranks(),
           (void*)stream);
  write_line(c->device(), text);
}

void log_config(const Config* config) {
  static const bool is_asked_for = asks_for("ENV");
  if (!is_asked_for || !config) return;
  auto write = [](const char* setting, int value) {
    if (value != INT_MIN) write_line(current_device, std::string("Comm config ") + setting + " set to " + std::to_string(value));
  };
  write("Blocking", config->blocking);
  write("CGA cluster size", config->cluster_size);
  write("Min CTAs", config->min_ctas);
  write("Max CTAs", config->max_ctas);
  write("Split share", config->split_share);
  if (!config->net_name) return;
  write_line(current_device, std::string("Comm config Net name set to ") + config->net_name);
  write_line(current_device, std::string("Using network ") + config->net_name);
}
