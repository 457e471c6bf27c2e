// grid.cpp - runs a grid block after block, and owns shared memory.
//
// Before every block shared memory is what a GPU gives: undefined. With poison it holds NaN, under
// MemorySanitizer it is marked undefined, under ThreadSanitizer it is new memory nobody has
// touched.
#include "block.h"
#include "report.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

// From sh.ld.
extern "C" char emu_shared_begin[], emu_shared_end[];

namespace emu {

namespace {

constexpr size_t PAGE = 4096;
constexpr size_t SHARED_ALIGN = 128;
constexpr size_t MAX_SHARED = 256 << 10; // above what any GPU has
constexpr unsigned char CANARY = 0xA5;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// ---- dynamic shared memory ----------------------------------------------------------------------
// Under AddressSanitizer: allocated with exactly the size asked for. Otherwise it ends where a page
// begins that cannot be touched; the bytes that alignment leaves before it hold a pattern that is
// looked at after every block.

char* arena; // MAX_SHARED bytes, then the forbidden page

void create_arena() {
    void* memory = mmap(nullptr, MAX_SHARED + PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    arena = static_cast<char*>(memory);
    mprotect(arena + MAX_SHARED, PAGE, PROT_NONE);
}

size_t slack_bytes() {
    return IS_ASAN ? 0 : round_up(machine.shared_bytes, SHARED_ALIGN) - machine.shared_bytes;
}

void set_shared_size(size_t bytes) {
    machine.shared_bytes = bytes;
    if (IS_ASAN) {
        free(machine.shared);
        void* memory = nullptr;
        if (bytes && posix_memalign(&memory, SHARED_ALIGN, bytes) != 0) abort();
        machine.shared = static_cast<char*>(memory);
    } else {
        if (!arena) create_arena();
        machine.shared = arena + MAX_SHARED - round_up(bytes, SHARED_ALIGN);
    }
}

void check_slack() {
    const char* slack = machine.shared + machine.shared_bytes;
    for (size_t i = 0; i < slack_bytes(); i++) {
        if (static_cast<unsigned char>(slack[i]) != CANARY) {
            kernel_error({},
                         "write %zu bytes past the %zu bytes of dynamic shared memory asked for", i,
                         machine.shared_bytes);
        }
    }
}

// ---- all shared memory before a block -----------------------------------------------------------

// 0xFF in every byte is NaN in float, bf16 and fp16, and -1 in integers. Not by memset: bytes
// between static variables are AddressSanitizer's, and ThreadSanitizer would take it for a write of
// the program.
__attribute__((no_sanitize("address"))) void poison(volatile char* begin, volatile char* end) {
    while (begin < end) *begin++ = '\xFF';
}

void make_shared_undefined() {
    if (settings().poison) {
        poison(machine.shared, machine.shared + machine.shared_bytes);
        poison(emu_shared_begin, emu_shared_end);
    }
    msan_set_undefined(machine.shared, machine.shared_bytes);
    msan_set_undefined(emu_shared_begin, static_cast<size_t>(emu_shared_end - emu_shared_begin));
    if (slack_bytes()) memset(machine.shared + machine.shared_bytes, CANARY, slack_bytes());
}

void replace_pages(char* begin, char* end) {
    if (begin == end) return;
    void* p = mmap(begin, static_cast<size_t>(end - begin), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (p == MAP_FAILED) abort();
}

// ThreadSanitizer: turns to the stream's other set of fibers. They were last used two blocks ago;
// that block's end and the new pages come before this block through a fiber of their own, so that
// nothing orders this block after the one just before.
void turn_to_other_set() {
    static void* control[NUM_SETS];
    machine.set ^= 1;
    if (!control[machine.set]) control[machine.set] = tsan_create("between blocks");
    tsan_switch(control[machine.set]);
    tsan_acquire(&machine.set_end[machine.set]);
    replace_pages(emu_shared_begin, emu_shared_end);
    replace_pages(arena, arena + MAX_SHARED);
    tsan_release(&machine.set_begin[machine.set]);
    tsan_switch(machine.tsan_stream);
}

// ---- a launch -----------------------------------------------------------------------------------

void set_block_shape(dim3 block) {
    blockDim = block;
    int n = static_cast<int>(block.x * block.y * block.z);
    machine.num_threads = n;
    machine.num_warps = (n + 31) / 32;
    for (int i = 0; i < n; i++) {
        Thread* t = &machine.threads[i];
        unsigned u = static_cast<unsigned>(i);
        t->index = {u % block.x, u / block.x % block.y, u / (block.x * block.y)};
        t->lane = i % 32;
        t->warp = &machine.warps[i / 32];
        machine.order_of_start[i] = machine.order == REVERSE ? n - 1 - i : i;
    }
    for (int w = 0; w < machine.num_warps; w++) {
        int lanes = std::min(32, n - 32 * w);
        machine.warps[w].exist = lanes == 32 ? ~0u : (1u << lanes) - 1;
    }
}

// Fibers of a set, made when a block first needs them.
void create_tsan_threads(int set) {
    static int num_made[NUM_SETS];
    for (int& i = num_made[set]; i < machine.num_threads; i++) {
        char name[64];
        snprintf(name, sizeof name, "CUDA thread %d", i);
        machine.threads[i].tsan[set] = tsan_create(name);
        machine.threads[i].copies.reserve(256); // no allocation inside a kernel
    }
}

void init_machine() {
    fiber_init_main(&machine.main_fiber);
    machine.order = settings().order;
    machine.random.seed(settings().order_seed);
}

// ---- profile ------------------------------------------------------------------------------------

struct Profile {
    struct Line {
        const void* kernel;
        double seconds;
        long launches, switches;
    };
    std::vector<Line> lines;

    Line* find(const void* kernel) {
        for (Line& line : lines) {
            if (line.kernel == kernel) return &line;
        }
        lines.push_back({kernel, 0, 0, 0});
        return &lines.back();
    }
    ~Profile() {
        for (Line& line : lines) {
            fprintf(stderr, "%-48s %7ld launches %10.3f ms %10ld switches\n",
                    function_name(line.kernel), line.launches, line.seconds * 1e3, line.switches);
        }
    }
};
Profile profile;

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

} // namespace

void* dyn_shared() { return machine.shared; }

bool is_past_dynamic_shared(const void* p) {
    const char* c = static_cast<const char*>(p);
    return arena && c >= arena + MAX_SHARED && c < arena + MAX_SHARED + PAGE;
}

void run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*),
              void* context) {
    static bool is_initialised = (init_machine(), true);
    (void)is_initialised;
    double begin = settings().profile ? now() : 0;
    long switches = machine.switches;

    machine.kernel = kernel;
    machine.body = body;
    machine.context = context;
    gridDim = grid;
    set_block_shape(block);
    set_shared_size(shared_bytes);
    if (IS_TSAN) {
        machine.tsan_stream = tsan_current();
        create_tsan_threads(machine.set);
        create_tsan_threads(machine.set ^ 1);
        tsan_release(&machine.grid_begin[machine.set / 2]);
    }

    size_t num_blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
    std::vector<size_t> shuffled;
    if (machine.order == RANDOM) {
        shuffled.resize(num_blocks);
        std::iota(shuffled.begin(), shuffled.end(), size_t(0));
        std::shuffle(shuffled.begin(), shuffled.end(), machine.random);
    }
    for (size_t i = 0; i < num_blocks; i++) {
        size_t b = i;
        if (machine.order == REVERSE) b = num_blocks - 1 - i;
        if (machine.order == RANDOM) {
            b = shuffled[i];
            std::shuffle(machine.order_of_start, machine.order_of_start + machine.num_threads,
                         machine.random);
        }
        blockIdx.x = static_cast<unsigned>(b % grid.x);
        blockIdx.y = static_cast<unsigned>(b / grid.x % grid.y);
        blockIdx.z = static_cast<unsigned>(b / (static_cast<size_t>(grid.x) * grid.y));
        if (IS_TSAN) turn_to_other_set();
        make_shared_undefined();
        run_threads();
        check_slack();
    }
    if (IS_TSAN) tsan_acquire(&machine.grid_end[machine.set / 2]);
    machine.kernel = nullptr;

    if (settings().profile) {
        Profile::Line* line = profile.find(kernel);
        line->seconds += now() - begin;
        line->launches++;
        line->switches += machine.switches - switches;
    }
}

} // namespace emu
