// symbols.cpp - the names of functions, from the symbol table of the program's own file.
//
// dladdr() would know exported functions only, and kernels are often static.
#include "report.h"
#include "sanitizer.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace emu {

namespace {

// The whole file of the running program, or null.
const char* map_program() {
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) return nullptr;
    size_t bytes = static_cast<size_t>(status.st_size);
    void* p = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    return p == MAP_FAILED ? nullptr : static_cast<const char*>(p);
}

// The mangled name of the function at this address of the file's image, or "".
const char* find_symbol(const char* elf, uintptr_t address) {
    const Elf64_Ehdr* header = reinterpret_cast<const Elf64_Ehdr*>(elf);
    const Elf64_Shdr* sections = reinterpret_cast<const Elf64_Shdr*>(elf + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const char* names = elf + sections[sections[i].sh_link].sh_offset;
        const Elf64_Sym* symbols = reinterpret_cast<const Elf64_Sym*>(elf + sections[i].sh_offset);
        size_t count = sections[i].sh_size / sizeof(Elf64_Sym);
        for (size_t k = 0; k < count; k++) {
            const Elf64_Sym& s = symbols[k];
            bool is_function = ELF64_ST_TYPE(s.st_info) == STT_FUNC;
            bool is_inside = address >= s.st_value && address < s.st_value + s.st_size;
            if (is_function && is_inside) return names + s.st_name;
        }
    }
    return "";
}

bool is_position_independent(const char* elf) {
    return reinterpret_cast<const Elf64_Ehdr*>(elf)->e_type == ET_DYN;
}

// "void emu::f<int>(float*)" becomes "emu::f<int>"; lambdas and the like stay as they are.
std::string shorten(std::string name) {
    const std::string anonymous = "(anonymous namespace)::";
    for (size_t p; (p = name.find(anonymous)) != std::string::npos;) {
        name.erase(p, anonymous.size());
    }
    size_t end = name.find('(');
    if (end != std::string::npos) name.resize(end);
    if (name.compare(0, 5, "void ") == 0) name.erase(0, 5); // stands in names of templates only
    return name;
}

} // namespace

const char* function_name(const void* code) {
    static const char* elf = map_program();
    static std::string name;
    Dl_info info;
    if (!elf || !dladdr(code, &info)) return "?";
    if (info.dli_fname && strstr(info.dli_fname, ".so")) return "?"; // not of this file
    uintptr_t base = reinterpret_cast<uintptr_t>(info.dli_fbase);
    uintptr_t address = reinterpret_cast<uintptr_t>(code);
    const char* mangled = find_symbol(elf, is_position_independent(elf) ? address - base : address);
    if (!*mangled) return "?";
    int status;
    char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    if (demangled) msan_set_text_defined(demangled);
    name = shorten(demangled ? demangled : mangled);
    free(demangled);
    return name.c_str();
}

} // namespace emu
