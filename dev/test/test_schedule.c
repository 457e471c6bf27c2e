// dev/test/test_schedule.c - learning rates against values worked out by hand, clipping, outliers.
#include <math.h>
#include <string.h>
#include "testing.h"
#include "train/schedule.h"

static void expect_lr(const Schedule* s, long step, double expected) {
    double lr = schedule_lr(s, step);
    EXPECT(fabs(lr - expected) <= 1e-15 + 1e-12 * expected, "%s step %ld: %.17g, expected %.17g",
           schedule_name(s->kind), step, lr, expected);
}

static void test_schedules(void) {
    // Peak 1, 10 steps of warm-up, 110 in all: the decay spans indices 10 to 110.
    Schedule s = {SCHEDULE_COSINE, 1.0, 10, 110, 0.1};
    for (int kind = SCHEDULE_COSINE; kind <= SCHEDULE_WSD; kind++) {
        s.kind = (ScheduleKind)kind;
        expect_lr(&s, 1, 0.1); // step k uses index k-1: 1 of 10 parts, not 0
        expect_lr(&s, 5, 0.5);
        expect_lr(&s, 10, 1.0);
        expect_lr(&s, 11, 1.0); // index 10, where the decay begins
    }
    s.kind = SCHEDULE_COSINE;
    expect_lr(&s, 61, 0.1 + 0.9 * 0.5); // half way
    expect_lr(&s, 36, 0.1 + 0.9 * 0.5 * (1 + cos(M_PI * 0.25)));
    expect_lr(&s, 110, 0.1 + 0.9 * 0.5 * (1 + cos(M_PI * 0.99))); // the last step
    s.kind = SCHEDULE_LINEAR;
    expect_lr(&s, 61, 0.1 + 0.9 * 0.5);
    expect_lr(&s, 110, 0.1 + 0.9 * 0.01);
    s.kind = SCHEDULE_CONSTANT;
    expect_lr(&s, 110, 1.0);
    s.kind = SCHEDULE_WSD; // decays from index 88 on, over 22
    expect_lr(&s, 89, 1.0);
    expect_lr(&s, 90, 0.1 + 0.9 * (1 - sqrt(1.0 / 22)));
    expect_lr(&s, 110, 0.1 + 0.9 * (1 - sqrt(21.0 / 22)));
    Schedule no_warmup = {SCHEDULE_LINEAR, 2.0, 0, 4, 0};
    expect_lr(&no_warmup, 1, 2.0);
    expect_lr(&no_warmup, 4, 0.5);
    Schedule default_frac = {SCHEDULE_COSINE, 3e-4, 0, 7, 1}; // -q 1: constant
    for (long step = 1; step <= 7; step++) expect_lr(&default_frac, step, 3e-4);
    test_report("four schedules");

    ScheduleKind kind;
    for (int k = SCHEDULE_COSINE; k <= SCHEDULE_WSD; k++)
        EXPECT(schedule_from_name(schedule_name((ScheduleKind)k), &kind) && (int)kind == k,
               "name %d", k);
    EXPECT(!schedule_from_name("step", &kind), "unknown name");
    test_report("names");
}

static void test_clip(void) {
    EXPECT(clip_coefficient(0.5, 1) == 1, "below");
    EXPECT(clip_coefficient(4, 1) == 1 / (4 + 1e-6), "above");
    EXPECT(clip_coefficient(1e9, 0) == 1, "off");
    EXPECT(clip_coefficient(0, 1) == 1, "zero norm");
    test_report("clip coefficient");
    EXPECT(lr_for_batch(1e-3, 100, 400, "linear") == 4e-3, "linear");
    EXPECT(lr_for_batch(1e-3, 100, 400, "sqrt") == 2e-3, "sqrt");
    test_report("learning rate and batch");
}

static void test_outliers(void) {
    OutlierValues window = {0};
    for (int i = 0; i < OUTLIER_WINDOW - 1; i++) {
        EXPECT(outlier_zscore(&window, 1e9) == 0, "no verdict on %d values", i);
        outlier_push(&window, i % 2 ? 1 : -1);
    }
    outlier_push(&window, (double)NAN);
    outlier_push(&window, (double)INFINITY);
    EXPECT(window.count == OUTLIER_WINDOW - 1, "values that are not finite do not enter");
    outlier_push(&window, 1); // 64 of each sign: mean 0, deviation 1
    EXPECT(outlier_zscore(&window, 3) == 3, "z = %g", outlier_zscore(&window, 3));
    EXPECT(outlier_zscore(&window, -2) == -2, "below the mean");
    for (int i = 0; i < OUTLIER_WINDOW; i++) outlier_push(&window, 5);
    EXPECT(window.count == OUTLIER_WINDOW && window.values[0] == 5, "old values leave");
    EXPECT(outlier_zscore(&window, 9) == 0, "no deviation, no verdict");
    outlier_push(&window, 6);
    EXPECT(window.values[OUTLIER_WINDOW - 1] == 6 && window.values[0] == 5, "oldest first");
    test_report("outliers");
}

int main(void) {
    test_schedules();
    test_clip();
    test_outliers();
    return test_finish();
}
