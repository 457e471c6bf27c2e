// dev/test/test_loss_scale.c - the scale halves once per overflow, grows after good steps, and
// stays between its floor and its ceiling.
#include "testing.h"
#include "train/loss_scale.h"

static void good_steps(double* scale, long* good, int steps) {
    for (int i = 0; i < steps; i++) loss_scale_update(scale, good, false);
}

int main(void) {
    double scale = loss_scale_initial(DTYPE_FP16);
    long good = 0;
    EXPECT(scale == LOSS_SCALE_INITIAL, "%g", scale);
    EXPECT(loss_scale_initial(DTYPE_BF16) == 1 && loss_scale_initial(DTYPE_FP32) == 1, "not 1");
    test_report("initial scale");

    loss_scale_update(&scale, &good, true);
    EXPECT(scale == LOSS_SCALE_INITIAL / 2 && good == 0, "%g after one overflow", scale);
    good_steps(&scale, &good, LOSS_SCALE_GROWTH - 1);
    loss_scale_update(&scale, &good, true);
    EXPECT(scale == LOSS_SCALE_INITIAL / 4 && good == 0, "an overflow must restart the count");
    test_report("halved once per overflow");

    good_steps(&scale, &good, LOSS_SCALE_GROWTH - 1);
    EXPECT(scale == LOSS_SCALE_INITIAL / 4, "grew early to %g", scale);
    good_steps(&scale, &good, 1);
    EXPECT(scale == LOSS_SCALE_INITIAL / 2 && good == 0, "%g after growth", scale);
    test_report("doubled after %d good steps", (int)LOSS_SCALE_GROWTH);

    for (int i = 0; i < 40; i++) loss_scale_update(&scale, &good, true);
    EXPECT(scale == LOSS_SCALE_FLOOR, "%g after 40 overflows", scale);
    good_steps(&scale, &good, 40 * LOSS_SCALE_GROWTH);
    EXPECT(scale == LOSS_SCALE_CEILING, "%g after 40 doublings", scale);
    test_report("floor and ceiling");
    return test_finish();
}
