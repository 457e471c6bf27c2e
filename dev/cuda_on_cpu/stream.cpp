// stream.cpp - streams and events.
//
// Every operation is queued. Eager streams run it at once. Lazy ones run it when the host waits for
// it, which is the other extreme of what a GPU may do; a missing wait then shows as old data, or
// NaN with poison. Which stream goes first is a second choice:
//   on demand   only what the awaited operation depends on, so a reader that does not wait for its
//               writer reads too early;
//   ahead       the other streams as far as they can go, so a writer that does not wait for the
//               readers of the old value overwrites it too early;
//   random      any stream that can go on.
// Under ThreadSanitizer every stream is a thread of its own that is ordered by events only, and a
// missing wait is a data race with both lines, whatever the order.
#include "stream.h"
#include "block.h"
#include "memory.h"
#include "report.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <stdio.h>

using emu::TsanKey;

struct CUevent_st {
    int number; // 1 for the first created
    unsigned flags;
    CUstream_st* stream = nullptr; // of the last record
    long num_recorded = 0, num_done = 0;
    std::chrono::steady_clock::time_point time = {};
    TsanKey done = {};
};

namespace emu {

namespace {

struct Operation {
    std::function<void()> run;
    const char* name;
    const void* kernel;
    cudaEvent_t wait_event; // null: the operation waits for nothing
    long wait_count;        // number of records of it that must be done
    TsanKey queued;

    bool is_blocked() const { return wait_event && wait_event->num_done < wait_count; }
};

} // namespace

} // namespace emu

struct CUstream_st {
    int number; // 0 for the null stream
    unsigned flags = 0;
    int priority = 0;
    std::deque<emu::Operation*> queue = {};
    void* tsan_fiber = nullptr;
    emu::Fiber* stack = nullptr; // ThreadSanitizer only
    TsanKey done = {};

    bool is_blocking() const { return !(flags & cudaStreamNonBlocking); }
    bool can_run() const { return !queue.empty() && !queue.front()->is_blocked(); }
};

namespace emu {

namespace {

CUstream_st null_stream{0};
std::vector<CUstream_st*> streams = {&null_stream}; // in order of creation
std::vector<CUevent_st*> events;
std::mt19937 random_stream(settings().lazy_seed);
cudaError_t last_error = cudaSuccess;

CUstream_st* resolve(cudaStream_t s) {
    if (!s || s == cudaStreamLegacy || s == cudaStreamPerThread) return &null_stream;
    if (std::find(streams.begin(), streams.end(), s) == streams.end()) {
        host_error("stream %p was destroyed or never created", static_cast<void*>(s));
    }
    return s;
}

CUevent_st* resolve(cudaEvent_t e) {
    if (std::find(events.begin(), events.end(), e) == events.end()) {
        host_error("event %p was destroyed or never created", static_cast<void*>(e));
    }
    return e;
}

// ---- running ------------------------------------------------------------------------------------

// From here to the other call the process is the stream, for ThreadSanitizer.
void become_stream(CUstream_st* s) {
    if (!s->tsan_fiber) {
        char name[32];
        snprintf(name, sizeof name, "stream %d", s->number);
        s->tsan_fiber = tsan_create(name);
    }
    tsan_switch(s->tsan_fiber);
    if (IS_TSAN) machine.set = 2 * (s->number % STREAM_SLOTS) + machine.set % 2;
}

void execute(CUstream_st* s, Operation* op) {
    tsan_acquire(&op->queued);
    if (op->wait_event) tsan_acquire(&op->wait_event->done);
    if (op->run) {
        DeviceAccess access;
        op->run();
        check_redzones(op->name, op->kernel);
    }
    delete op; // with the arguments that the threads of its kernel have read
    tsan_release(&s->done);
}

// ThreadSanitizer would take streams that use one stack in turn for a race, so each has its own.
struct Handover {
    CUstream_st* stream;
    Operation* op;
    void* host_stack;
};
Handover handover;

void stream_stack_entry() {
    for (;;) {
        execute(handover.stream, handover.op);
        emu_switch_stack(&handover.stream->stack->stack_pointer, handover.host_stack);
    }
}

void execute_on_own_stack(CUstream_st* s, Operation* op) {
    constexpr size_t STACK_BYTES = 8 << 20; // MPI runs on it too
    if (!s->stack) s->stack = fiber_create(stream_stack_entry, STACK_BYTES);
    handover = {s, op, nullptr};
    void* host_fiber = tsan_current();
    become_stream(s);
    emu_switch_stack(&handover.host_stack, s->stack->stack_pointer);
    tsan_switch(host_fiber);
}

// Runs the first operation of a stream that can run.
void step(CUstream_st* s) {
    static bool is_running = false;
    if (is_running) host_error("the CUDA API was called from a host function or a kernel");
    is_running = true;
    Operation* op = s->queue.front();
    s->queue.pop_front();
    if (IS_TSAN)
        execute_on_own_stack(s, op);
    else
        execute(s, op);
    is_running = false;
}

// The stream to run next so that `target` gets on; every wait names a record queued before it, so
// the chain of blocked streams ends.
CUstream_st* choose(CUstream_st* target) {
    Lazy lazy = settings().lazy;
    if (lazy == AHEAD) {
        for (CUstream_st* s : streams) {
            if (s != target && s->can_run()) return s;
        }
    }
    if (lazy == RANDOM_STREAM) {
        std::vector<CUstream_st*> able;
        for (CUstream_st* s : streams) {
            if (s->can_run()) able.push_back(s);
        }
        return able[random_stream() % able.size()];
    }
    while (!target->can_run()) target = target->queue.front()->wait_event->stream;
    return target;
}

void drain(CUstream_st* s) {
    while (!s->queue.empty()) step(choose(s));
}

void push(CUstream_st* s, Operation* op) {
    tsan_release(&op->queued);
    s->queue.push_back(op);
    if (settings().lazy == EAGER) drain(s);
}

// The null stream and the blocking streams wait for each other.
void join_null_stream(CUstream_st* s) {
    if (!s->is_blocking()) return;
    for (CUstream_st* other : streams) {
        bool waits = other != s && other->is_blocking() && (s->number == 0 || other->number == 0);
        if (!waits) continue;
        drain(other);
        if (IS_TSAN) {
            void* host_fiber = tsan_current();
            become_stream(s);
            tsan_acquire(&other->done);
            tsan_switch(host_fiber);
        }
    }
}

// ---- waits that a test takes away ---------------------------------------------------------------

struct Edge {
    int event, stream; // numbers; stream -1: the host
    long num_waits;
};

struct Edges {
    std::vector<Edge> list;
    long num_waits = 0;

    long index_of(int event, int stream) {
        for (size_t i = 0; i < list.size(); i++) {
            if (list[i].event == event && list[i].stream == stream) return static_cast<long>(i);
        }
        list.push_back({event, stream, 0});
        return static_cast<long>(list.size()) - 1;
    }
    ~Edges() {
        const Settings& s = settings();
        for (size_t i = 0; s.list_edges && i < list.size(); i++) {
            const Edge& e = list[i];
            fprintf(stderr, "cuda_on_cpu: edge %zu: event %d, awaited by ", i + 1, e.event);
            if (e.stream < 0)
                fprintf(stderr, "the host");
            else
                fprintf(stderr, "stream %d", e.stream);
            fprintf(stderr, ", %ld waits\n", e.num_waits);
        }
        if (s.list_edges) fprintf(stderr, "cuda_on_cpu: %ld waits\n", num_waits);
        if (s.drop_wait > num_waits) {
            fprintf(stderr, "cuda_on_cpu: no wait %ld to drop, %ld in all\n", s.drop_wait,
                    num_waits);
        }
        if (s.drop_edge > static_cast<long>(list.size())) {
            fprintf(stderr, "cuda_on_cpu: no edge %ld to drop, %zu in all\n", s.drop_edge,
                    list.size());
        }
    }
};
Edges edges;

// The host's queries belong to an edge, but are not counted: how many there are is chance.
bool is_dropped_query(CUevent_st* e) {
    return edges.index_of(e->number, -1) + 1 == settings().drop_edge;
}

// Counts a wait of `waiter` (null: the host) for an event; true if it is to be ignored.
bool is_dropped(CUevent_st* e, CUstream_st* waiter) {
    if (e->stream == waiter) return false; // orders nothing
    long number = ++edges.num_waits;
    long edge = edges.index_of(e->number, waiter ? waiter->number : -1);
    edges.list[static_cast<size_t>(edge)].num_waits++;
    return number == settings().drop_wait || edge + 1 == settings().drop_edge;
}

// ---- events -------------------------------------------------------------------------------------

void record(CUevent_st* e, CUstream_st* s) {
    if (e->stream != s) { // earlier records of another stream must not be mistaken for this one
        if (e->stream) drain(e->stream);
        e->stream = s;
    }
    long count = ++e->num_recorded;
    auto mark = [=] {
        e->num_done = count;
        e->time = std::chrono::steady_clock::now();
        tsan_release(&e->done);
    };
    push(s, new Operation{mark, "event record", nullptr, nullptr, 0, {}});
}

void wait_on_stream(CUstream_st* s, CUevent_st* e) {
    if (!e->stream || is_dropped(e, s)) return;
    push(s, new Operation{nullptr, "event wait", nullptr, e, e->num_recorded, {}});
}

void wait_on_host(CUevent_st* e) {
    if (!e->stream || is_dropped(e, nullptr)) return;
    while (e->num_done < e->num_recorded) step(choose(e->stream));
    tsan_acquire(&e->done);
}

// A lazy stream gets on by one operation at each query, so that a loop of queries ends.
cudaError_t query(CUevent_st* e) {
    if (!e->stream || is_dropped_query(e)) return cudaSuccess;
    if (e->num_done < e->num_recorded) step(choose(e->stream));
    if (e->num_done < e->num_recorded) return cudaErrorNotReady;
    tsan_acquire(&e->done);
    return cudaSuccess;
}

cudaError_t elapsed(float* ms, CUevent_st* begin, CUevent_st* end) {
    if ((begin->flags | end->flags) & cudaEventDisableTiming) return cudaErrorInvalidResourceHandle;
    if (!begin->num_recorded || !end->num_recorded) return cudaErrorInvalidResourceHandle;
    bool is_done = begin->num_done == begin->num_recorded && end->num_done == end->num_recorded;
    if (!is_done) return cudaErrorNotReady;
    *ms = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
    return cudaSuccess;
}

cudaError_t create_stream(cudaStream_t* out, unsigned flags, int priority) {
    static int number = 0;
    if (settings().devices == 0) return cudaErrorNoDevice;
    CUstream_st* s = new CUstream_st{++number};
    s->flags = flags;
    s->priority = priority;
    streams.push_back(s);
    *out = s;
    return cudaSuccess;
}

} // namespace

// ---- for the other parts ------------------------------------------------------------------------

void enqueue(cudaStream_t stream, const char* name, std::function<void()> work,
             const void* kernel) {
    CUstream_st* s = resolve(stream);
    join_null_stream(s);
    push(s, new Operation{std::move(work), name, kernel, nullptr, 0, {}});
}

void synchronize(cudaStream_t stream) {
    CUstream_st* s = resolve(stream);
    drain(s);
    tsan_acquire(&s->done);
}

void synchronize_all() {
    for (CUstream_st* s : streams) synchronize(s->number ? s : nullptr);
}

cudaError_t set_last_error(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

} // namespace emu

using namespace emu;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
    return set_last_error(create_stream(s, flags, priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    return set_last_error(create_stream(s, flags, 0));
}
cudaError_t cudaStreamCreate(cudaStream_t* s) {
    return set_last_error(create_stream(s, cudaStreamDefault, 0));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    CUstream_st* s = resolve(stream);
    if (s->number == 0) return set_last_error(cudaErrorInvalidResourceHandle);
    synchronize(stream);
    for (CUevent_st* e : events) { // what was recorded on it has happened
        if (e->stream == s) e->stream = nullptr;
    }
    streams.erase(std::find(streams.begin(), streams.end(), s));
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
    *priority = resolve(s)->priority;
    return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* flags) {
    *flags = resolve(s)->flags;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    synchronize(s);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    CUstream_st* s = resolve(stream);
    if (!s->queue.empty()) step(choose(s));
    if (!s->queue.empty()) return cudaErrorNotReady;
    tsan_acquire(&s->done);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    synchronize_all();
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* argument) {
    enqueue(s, "host function", [=] { function(argument); });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    static int number = 0;
    if (settings().devices == 0) return set_last_error(cudaErrorNoDevice);
    *out = new CUevent_st{++number, flags};
    events.push_back(*out);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) {
    return cudaEventCreateWithFlags(e, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    CUevent_st* e = resolve(event);
    for (CUstream_st* s : streams) drain(s); // others may still have to wait for it
    events.erase(std::find(events.begin(), events.end(), e));
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    record(resolve(e), resolve(s));
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    wait_on_stream(resolve(s), resolve(e));
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    wait_on_host(resolve(e));
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) { return query(resolve(e)); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    return set_last_error(elapsed(ms, resolve(begin), resolve(end)));
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

} // extern "C"
