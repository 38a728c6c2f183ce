// cp.async as a kernel uses it: zero fill, two groups, and the value that is visible before the wait.
extern "C" __global__ void stages(const float* x, float* y, int valid, int early) {
    __shared__ __align__(16) float s[2][4];
    for (int k = 0; k < 4; k++) s[0][k] = s[1][k] = -1.0f;
    emulated_cp_async_16_zfill(s[0], x, 4 * valid);
    emulated_cp_async_commit();
    emulated_cp_async_16(s[1], x + 4);
    emulated_cp_async_commit();
    emulated_cp_async_wait(1);
    for (int k = 0; k < 4; k++) y[k] = s[0][k];
    if (!early) emulated_cp_async_wait(0);
    for (int k = 0; k < 4; k++) y[4 + k] = s[1][k];
}
