// Takes over libraries that were loaded before this one. Three kinds of addresses are replaced by those of this
// library's functions of the same names: in the dynamic linker's tables (GOT), in the table of symbols of the machine's
// own driver, and in variables of modules of cuda.bindings. Libraries that load later find this one first.
#include "emulated.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cctype>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

static std::vector<std::pair<void**, void*>> replaced;  // where, and what was there before
static std::set<std::pair<uintptr_t, std::string>> done;  // libraries, by address and path
static void* self;

static bool is_of_cuda(const char* name) {
  for (const char* prefix : {"cu", "__cuda", "nvrtc", "nccl"})
    if (!strncmp(name, prefix, strlen(prefix))) return true;
  return false;
}

// NVIDIA's own libraries go on calling each other, as they do if this library is loaded first.
static bool is_left_alone(const char* path) {
  const char* file = strrchr(path, '/');
  if (!file) return true;  // the program itself, the kernel's library
  ++file;
  for (const char* prefix : {"libcu", "libnv", "libnccl", "ld-", "libc.so"})
    if (!strncmp(file, prefix, strlen(prefix))) return true;
  return false;
}

static void* find_own_function(const char* name) {
  void* found = dlsym(self, name);
  Dl_info of_found, of_self;
  if (!found || !dladdr(found, &of_found) || !dladdr((void*)&find_own_function, &of_self)) return nullptr;
  return of_found.dli_fbase == of_self.dli_fbase ? found : nullptr;
}

// Torch's libraries refer to the same functions, and dladdr searches all symbols of a library.
static void* own_function(const char* name) {
  static std::unordered_map<std::string, void*> known;
  auto [entry, is_new] = known.try_emplace(name);
  if (is_new) entry->second = find_own_function(name);
  return entry->second;
}

static void* own_library() {
  Dl_info info;
  return dladdr((void*)&own_library, &info) ? dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY) : nullptr;
}

// The dynamic linker finds libraries by name in the order in which they were loaded: on a machine with a GPU cuBLAS
// has loaded the real driver before. The call of dlopen is the last act of this function, so the compiler makes a jump
// of it, and dlopen goes on looking where its caller's libraries are.
static void* open_library(const char* name, int flags) {
  if (name && (!strcmp(name, "libcuda.so.1") || !strcmp(name, "libcuda.so"))) return own_library();
  return dlopen(name, flags);
}

static void write_entry(void** entry, void* value) {
  size_t page = sysconf(_SC_PAGESIZE);
  void* start = (void*)((uintptr_t)entry / page * page);
  if (!mprotect(start, page, PROT_READ | PROT_WRITE)) *entry = value;
}

static void replace(void** entry, void* value) {
  if (*entry == value) return;
  replaced.emplace_back(entry, *entry);
  write_entry(entry, value);
}

struct Tables {  // of a library, for the dynamic linker
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* relocations[2] = {};
  size_t sizes[2] = {}, unnamed = 0;  // torch has a million entries without a symbol, which come first
  const uint32_t *hashes = nullptr, *gnu_hashes = nullptr;

  explicit Tables(const dl_phdr_info* library) {
    const ElfW(Dyn)* dynamic = nullptr;
    for (int i = 0; i < library->dlpi_phnum; ++i)
      if (library->dlpi_phdr[i].p_type == PT_DYNAMIC)
        dynamic = (const ElfW(Dyn)*)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
    for (; dynamic && dynamic->d_tag; ++dynamic) {
      auto address = dynamic->d_un.d_ptr;
      if (dynamic->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym)*)address;
      if (dynamic->d_tag == DT_STRTAB) names = (const char*)address;
      if (dynamic->d_tag == DT_JMPREL) relocations[0] = (const ElfW(Rela)*)address;
      if (dynamic->d_tag == DT_PLTRELSZ) sizes[0] = dynamic->d_un.d_val;
      if (dynamic->d_tag == DT_RELA) relocations[1] = (const ElfW(Rela)*)address;
      if (dynamic->d_tag == DT_RELASZ) sizes[1] = dynamic->d_un.d_val;
      if (dynamic->d_tag == DT_RELACOUNT) unnamed = dynamic->d_un.d_val;
      if (dynamic->d_tag == DT_HASH) hashes = (const uint32_t*)address;
      if (dynamic->d_tag == DT_GNU_HASH) gnu_hashes = (const uint32_t*)address;
    }
  }

  // The number of symbols is written nowhere else than in a table of hashes.
  size_t count() const {
    if (hashes) return hashes[1];
    if (!gnu_hashes) return 0;
    uint32_t buckets = gnu_hashes[0], first = gnu_hashes[1], words = gnu_hashes[2], last = 0;
    const uint32_t* bucket = gnu_hashes + 4 + words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    for (uint32_t i = 0; i < buckets; ++i) last = bucket[i] > last ? bucket[i] : last;
    if (last < first) return first;
    while (!(bucket[buckets + last - first] & 1)) ++last;
    return last + 1;
  }
};

static bool is_function_of_driver(const char* name) { return !strncmp(name, "cu", 2) && isupper((unsigned char)name[2]); }

// The copy of the runtime inside NVIDIA's libraries opens the driver by its name, and finds the machine's if that was
// loaded first. The functions that it looks up there are then ours, or missing, as if ours had been loaded first.
static void redirect_exports(const dl_phdr_info* driver) {
  Tables tables(driver);
  for (size_t i = 1, count = tables.count(); i < count; ++i) {
    auto& symbol = const_cast<ElfW(Sym)&>(tables.symbols[i]);
    const char* name = tables.names + symbol.st_name;
    if (!symbol.st_shndx || ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !is_function_of_driver(name)) continue;
    void* ours = own_function(name);  // an address of 0 is no symbol to the dynamic linker
    replace((void**)&symbol.st_value, ours ? (void*)((uintptr_t)ours - driver->dlpi_addr) : nullptr);
  }
}

static bool is_driver(const char* path) {
  const char* file = strrchr(path, '/');
  return file && !strncmp(file, "/libcuda.so", strlen("/libcuda.so"));
}

static int take_over(dl_phdr_info* library, size_t, void*) {
  bool redirects = is_driver(library->dlpi_name);
  if (!redirects && is_left_alone(library->dlpi_name)) return 0;
  if (!done.emplace(library->dlpi_addr, library->dlpi_name).second) return 0;
  Dl_info info;
  if (dladdr((void*)&take_over, &info) && (uintptr_t)info.dli_fbase == library->dlpi_addr) return 0;  // this library
  if (redirects) {
    redirect_exports(library);
    return 0;
  }
  Tables tables(library);
  for (int table = 0; table < 2; ++table)
    for (size_t i = table ? tables.unnamed : 0; i < tables.sizes[table] / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela)& relocation = tables.relocations[table][i];
      auto type = ELF64_R_TYPE(relocation.r_info);
      if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT && type != R_X86_64_64) continue;
      const ElfW(Sym)& symbol = tables.symbols[ELF64_R_SYM(relocation.r_info)];
      if (symbol.st_shndx) continue;  // before its name is read, because most have none here to replace
      const char* name = tables.names + symbol.st_name;
      bool opens = !strcmp(name, "dlopen");
      if (!opens && !is_of_cuda(name)) continue;
      void* ours = opens ? (void*)&open_library : own_function(name);
      if (ours) replace((void**)(library->dlpi_addr + relocation.r_offset), ours);
    }
  return 0;
}

// Takes over libraries that were loaded since the last call; returns how many entries now lead here.
API int emulated_take_over() {
  self = own_library();
  if (!self) return 0;
  size_t before = replaced.size();
  dl_iterate_phdr(take_over, nullptr);
  return (int)(replaced.size() - before);
}

API void emulated_give_back() {
  for (auto& [entry, value] : replaced) write_entry(entry, value);
  replaced.clear();
  done.clear();
}

// ---- Modules of cuda.bindings, which keep addresses of each other's functions in variables ----

using Addresses = std::map<void*, void*>;  // what is replaced, and by what

static int replace_in(dl_phdr_info* library, size_t, void* addresses) {
  const char* folder = strstr(library->dlpi_name, "/cuda/");
  if (!folder) return 0;
  uintptr_t fixed_from = 0, fixed_to = 0;  // the linker's tables, which are read-only by now
  for (int i = 0; i < library->dlpi_phnum; ++i)
    if (auto& part = library->dlpi_phdr[i]; part.p_type == PT_GNU_RELRO) {
      fixed_from = library->dlpi_addr + part.p_vaddr;
      fixed_to = round_up(fixed_from + part.p_memsz, sysconf(_SC_PAGESIZE));
    }
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    auto& part = library->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || !(part.p_flags & PF_W)) continue;
    uintptr_t at = round_up(library->dlpi_addr + part.p_vaddr, sizeof(void*));
    for (uintptr_t end = library->dlpi_addr + part.p_vaddr + part.p_memsz; at + sizeof(void*) <= end; at += sizeof(void*)) {
      if (at >= fixed_from && at < fixed_to) continue;
      auto found = ((Addresses*)addresses)->find(*(void**)at);
      if (found != ((Addresses*)addresses)->end()) *(void**)at = found->second;
    }
  }
  return 0;
}
// Replaces addresses of functions wherever modules in a folder named cuda keep them.
API void emulated_replace_addresses(void* const* from, void* const* to, size_t count) {
  Addresses addresses;
  for (size_t i = 0; i < count; ++i) addresses[from[i]] = to[i];
  dl_iterate_phdr(replace_in, &addresses);
}
