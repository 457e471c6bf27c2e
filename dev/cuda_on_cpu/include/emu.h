// emu.h - what CUDA source compiled for the CPU asks of the runtime beside it.
//
// The CUDA language lives in cuda_runtime.h and the headers it includes; this one declares the
// runtime's side: how a kernel is started, how its threads meet, and how a check that fails is
// reported. Nothing here is meant to be called by a CUDA program, except through launch() of the
// program's own portability header.
#ifndef EMU_H
#define EMU_H

#include <cuda_runtime_api.h>
#include <functional>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <type_traits>
#include <utility>

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emu {

// ---- where a thread stands ----------------------------------------------------------------------

// A place in the source. Every barrier and warp operation takes its caller's through two defaulted
// arguments, so that reports name the line and operations of different lines are told apart.
struct Site {
    const char* file;
    int line;
};
#define EMU_HERE const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_SITE (emu::Site{emu_file, emu_line})

// Reports an error of the kernel that runs, with kernel, block and the state of its threads, and
// ends the process with exit code 97.
[[noreturn]] void kernel_error(Site where, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// ---- starting a kernel --------------------------------------------------------------------------

// Queues work on a stream; it runs at once, or when somebody waits for it (CUDA_ON_CPU_LAZY).
// `name` is for reports and must live; a kernel's own name is used where `kernel` is given.
void enqueue(cudaStream_t stream, const char* name, std::function<void()> work,
             const void* kernel = nullptr);

// Refuses what a GPU refuses: block and grid sizes, shared memory above the limit set.
cudaError_t check_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes);

// Ends the run when argument `index` of `kernel` is a pointer to memory a GPU could not reach.
void check_pointer(const void* kernel, int index, const void* p);
template <class T> void check_argument(const void* kernel, int index, const T& argument) {
    constexpr bool is_data = !std::is_function_v<std::remove_pointer_t<T>>;
    if constexpr (std::is_pointer_v<T> && is_data) check_pointer(kernel, index, argument);
}

// Runs `body(context)` once for every thread of every block.
void run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*),
              void* context);

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), without the syntax.
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, A&&... arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "number of kernel arguments");
    const void* id = reinterpret_cast<const void*>(kernel);
    cudaError_t refused = check_launch(id, grid, block, shared_bytes);
    if (refused != cudaSuccess) return refused;

    std::tuple<std::decay_t<P>...> values(
        static_cast<std::decay_t<P>>(std::forward<A>(arguments))...);
    int index = 0;
    std::apply([&](auto&... value) { (check_argument(id, ++index, value), ...); }, values);
    (void)index; // a kernel without parameters

    auto run = [=]() mutable {
        auto call = [&] { std::apply(kernel, values); };
        auto body = [](void* context) { (*static_cast<decltype(call)*>(context))(); };
        run_grid(id, grid, block, shared_bytes, body, &call);
    };
    enqueue(stream, "kernel", std::move(run), id);
    return cudaSuccess;
}

// ---- inside a kernel ----------------------------------------------------------------------------

extern int current_lane; // of the thread that runs, 0 to 31
inline int lane() { return current_lane; }

void* dyn_shared(); // the block's dynamic shared memory

enum BlockReduction { REDUCE_COUNT, REDUCE_AND, REDUCE_OR };
void sync_block(Site where);
int sync_block_reduce(BlockReduction operation, bool value, Site where);

// The one warp operation that all others are made of: deposits `bytes` bytes, waits until every
// lane of `mask` has done so, and returns the table of what they deposited, lane i at i * bytes.
// The table stays valid until the lane's next operation with the same mask. As CUDA says, only an
// operation without a deposit (__syncwarp) orders the lanes' memory accesses.
constexpr size_t MAX_DEPOSIT = 64;
const char* warp_exchange(uint32_t mask, const void* deposit, size_t bytes, Site where);

template <class T> T table_entry(const char* table, int lane) {
    T value;
    memcpy(static_cast<void*>(&value), table + lane * sizeof value, sizeof value);
    return value;
}

uint32_t existing_lanes(uint32_t mask); // mask without lanes beyond the end of the block

// cp.async: the first valid_bytes of 16 are copied, zeros follow. See CUDA_ON_CPU_ASYNC.
void cp_async(void* shared, const void* global, int valid_bytes, Site where);
void cp_commit();
void cp_wait(int newest_pending);

} // namespace emu

#endif
