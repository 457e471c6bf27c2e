// backend/comm/table.c - what the ranks of one host are doing. See table.h.
#include "backend/comm/table.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/fault.h"
#include "core/rng.h"

// The table is shared memory, so plain loads and stores of single words are made atomic where
// another process looks at them.
#define LOAD(word)         __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define STORE(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)

static const char* const op_names[NUM_COMM_OPS] = {"all_gather", "reduce_scatter", "message",
                                                   "barrier"};
const char* comm_op_name(CommOp op) { return op_names[op]; }

size_t table_bytes(int local_size) {
    return sizeof(CommTable) + (size_t)local_size * sizeof(CommRecord);
}

void table_init(CommTable* table, int local_size, bool is_shared) {
    memset(table, 0, table_bytes(local_size));
    table->is_shared = is_shared;
    table->num_records = local_size;
    for (int i = 0; i < local_size; i++) table->records[i].ticked = now_seconds();
}

CommTable* table_create_private(void) {
    CommTable* table = checked_calloc(1, table_bytes(1));
    table_init(table, 1, false);
    return table;
}

static void sleep_seconds(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (seconds > 0 && nanosleep(&left, &left) != 0) {
    }
}

// ---- failing ------------------------------------------------------------------------------------

const char* comm_entry_text(const CommEntry* entry, char* text, size_t size) {
    char unit[32] = "";
    if (entry->unit == 0) snprintf(unit, sizeof(unit), "(embedding)");
    if (entry->unit > 0) snprintf(unit, sizeof(unit), "(block %d)", entry->unit - 1);
    snprintf(text, size, "seq %ld %s%s step %ld micro %d", entry->seq, op_names[entry->op], unit,
             entry->step, entry->micro);
    return text;
}

bool table_may_report(CommTable* table) {
    if (__atomic_exchange_n(&table->reported, 1, __ATOMIC_ACQ_REL) == 0) return true;
    sleep_seconds(1.0);
    return false;
}

void table_fail(CommTable* table, const char* fmt, ...) {
    if (table_may_report(table)) {
        char text[1000];
        va_list args;
        va_start(args, fmt);
        vsnprintf(text, sizeof(text), fmt, args);
        va_end(args);
        fprintf(stderr, "error: %s\n", text);
    }
    _exit(EXIT_COMM);
}

static bool same_entry(const CommEntry* a, const CommEntry* b) {
    return a->seq == b->seq && a->op == b->op && a->unit == b->unit && a->step == b->step &&
           a->micro == b->micro && a->elems == b->elems;
}

// Names the first rank that has left out collective `seq` or entered another one than the rest.
// entries (count), one per rank in the order of `ranks`; one with another seq counts as left out.
NO_RETURN static void fail_at(CommTable* table, long seq, const CommEntry* entries,
                              const int* ranks, int count) {
    int right = -1, most = 0; // the entry that most ranks share; the first of equals
    for (int i = 0; i < count; i++) {
        int agree = 0;
        for (int j = 0; j < count; j++) agree += same_entry(&entries[i], &entries[j]);
        if (entries[i].seq == seq && agree > most) most = agree, right = i;
    }
    CHECK(right >= 0, "no rank has entered seq %ld", seq);
    int wrong = 0;
    while (wrong < count - 1 && same_entry(&entries[wrong], &entries[right])) wrong++;

    char expected[120], found[120], others[200] = "";
    size_t used = 0;
    for (int i = 0; i < count && used + 12 < sizeof(others); i++) {
        if (!same_entry(&entries[i], &entries[right])) continue;
        used += (size_t)snprintf(others + used, sizeof(others) - used, "%s%d", used ? "," : "",
                                 ranks[i]);
    }
    comm_entry_text(&entries[right], expected, sizeof(expected));
    comm_entry_text(&entries[wrong], found, sizeof(found));
    if (entries[wrong].seq != seq) {
        table_fail(table, "rank %d has not entered %s; ranks %s wait there, it has gone on",
                   ranks[wrong], expected, others);
    }
    table_fail(table, "rank %d entered %s with %zu elements, ranks %s entered %s with %zu",
               ranks[wrong], found, entries[wrong].elems, others, expected, entries[right].elems);
}

void table_compare_entries(CommTable* table, const CommEntry* entries, int count) {
    long lowest = LONG_MAX;
    bool all_same = true;
    for (int r = 0; r < count; r++) {
        if (entries[r].seq < lowest) lowest = entries[r].seq;
        all_same &= same_entry(&entries[r], &entries[0]);
    }
    if (all_same) return;
    int* ranks = checked_malloc((size_t)count * sizeof(int));
    for (int r = 0; r < count; r++) ranks[r] = r;
    fail_at(table, lowest, entries, ranks, count);
}

// The ranks of this host have met with different pasts: finds where they part.
NO_RETURN static void fail_by_history(CommTable* table) {
    const int count = table->num_records;
    CommEntry* entries = checked_malloc((size_t)count * sizeof(CommEntry));
    int* ranks = checked_malloc((size_t)count * sizeof(int));
    long last = 0;
    for (int i = 0; i < count; i++) {
        ranks[i] = table->records[i].rank;
        if (table->records[i].seq > last) last = table->records[i].seq;
    }
    for (long seq = last < TABLE_HISTORY ? 1 : last - TABLE_HISTORY + 1; seq <= last; seq++) {
        bool all_same = true, any = false;
        for (int i = 0; i < count; i++) {
            entries[i] = table->records[i].history[seq % TABLE_HISTORY];
            any |= entries[i].seq == seq;
            all_same &= same_entry(&entries[i], &entries[0]);
        }
        if (any && !all_same) fail_at(table, seq, entries, ranks, count);
    }
    table_fail(table, "the ranks have entered different collectives more than %d ago",
               TABLE_HISTORY);
}

// ---- rendezvous ---------------------------------------------------------------------------------

// Short enough not to matter, long enough for ranks that have cores of their own to meet awake.
enum { SPINS = 2000 };

static void wait_for_generation(CommTable* table, uint32_t before) {
    static long cores; // the call reads a file
    if (cores == 0) cores = sysconf(_SC_NPROCESSORS_ONLN);
    const bool share_cores = table->num_records > cores;
    for (int i = 0; !share_cores && i < SPINS; i++) {
        if (LOAD(table->generation) != before) return;
    }
    while (LOAD(table->generation) == before) {
        syscall(SYS_futex, &table->generation, FUTEX_WAIT, before, NULL, NULL, 0);
    }
}

void table_rendezvous(Comm* comm) {
    CommTable* table = comm->table;
    CommRecord* mine = table_record(comm);
    const uint32_t generation = LOAD(table->generation);
    const int side = (int)(generation & 1);
    mine->brought[side].seq = mine->seq;
    mine->brought[side].hash = mine->hash;
    if (__atomic_add_fetch(&table->arrived, 1, __ATOMIC_ACQ_REL) == table->num_records) {
        STORE(table->arrived, 0);
        __atomic_add_fetch(&table->generation, 1, __ATOMIC_ACQ_REL);
        syscall(SYS_futex, &table->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    } else {
        wait_for_generation(table, generation);
    }
    for (int i = 0; i < table->num_records; i++) {
        const CommRecord* other = &table->records[i];
        if (other->brought[side].seq != mine->brought[side].seq ||
            other->brought[side].hash != mine->brought[side].hash) {
            fail_by_history(table);
        }
    }
}

// ---- around every collective --------------------------------------------------------------------

bool comm_enter(Comm* comm, CommOp op, int unit, size_t elems) {
    CommRecord* record = table_record(comm);
    const long seq = ++comm->seq;
    if (fault_now(FAULT_STOP, comm->step, seq)) raise(SIGSTOP);
    if (fault_now(FAULT_DELAY, comm->step, seq)) sleep_seconds(fault_delay_ms() * 1e-3);
    if (fault_now(FAULT_SKIP, comm->step, seq)) return false;
    if (fault_now(FAULT_COUNT, comm->step, seq)) elems++;

    const CommEntry entry = {seq, (int)op, unit, comm->step, comm->micro, elems};
    record->history[seq % TABLE_HISTORY] = entry;
    const uint64_t words[] = {(uint64_t)seq,        (uint64_t)op,          (uint64_t)unit,
                              (uint64_t)comm->step, (uint64_t)comm->micro, (uint64_t)elems};
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        record->hash = mix64(record->hash + words[i]);
    }
    record->entered = now_seconds();
    STORE(record->seq, seq);
    STORE(record->inside, 1);
    return true;
}

void comm_leave(Comm* comm, CommOp op, size_t sent_elems, size_t element_bytes) {
    CommRecord* record = table_record(comm);
    CommStats* stats = &comm->stats[op];
    const size_t bytes = sent_elems * element_bytes;
    double seconds = now_seconds() - record->entered;
    if (comm->link_bytes_s > 0) {
        sleep_seconds((double)bytes / comm->link_bytes_s - seconds);
        seconds = now_seconds() - record->entered;
    }
    stats->calls++;
    stats->bytes += bytes;
    stats->seconds += seconds;
    comm->wait_seconds += seconds;
    comm->elements_sent += sent_elems;
    comm->bytes_sent += bytes;
    STORE(record->inside, 0);
}
