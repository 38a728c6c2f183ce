// What Python needs to know about a kernel: how to call it, and the kind and size of every parameter.
//
// EMU_EXPORT_KERNEL(k, bounds) is appended to the source once per kernel. The parameter list comes from the kernel's
// own type, so it cannot disagree with the source.
#pragma once

struct emu_parameter {
    char kind;             // 'p' pointer, 'i' integer or bool, 'f' floating point, 's' struct
    int32_t size;          // bytes of the parameter itself
    int32_t element_size;  // pointers: bytes of what it points to, 0 for void
    int32_t exact;         // pointers: 1 if it points to a plain number
    int32_t read_only;     // pointers: 1 if it points to const
};

#define EMU_NOT_CHECKED __attribute__((no_sanitize("thread", "undefined")))

template <class T>
emu_parameter emu_describe() {
    using Target = std::remove_pointer_t<T>;
    emu_parameter p = {'s', (int32_t)sizeof(T), 0, 0, 0};
    if constexpr (std::is_pointer_v<T>) {
        p.kind = 'p';
        p.exact = std::is_arithmetic_v<Target>;
        p.read_only = std::is_const_v<Target>;
        if constexpr (!std::is_void_v<Target>) p.element_size = (int32_t)sizeof(Target);
    } else if constexpr (std::is_floating_point_v<T>) {
        p.kind = 'f';
    } else if constexpr (std::is_integral_v<T>) {
        p.kind = 'i';
    }
    return p;
}

template <class... P>
EMU_NOT_CHECKED int emu_signature(void (*)(P...), emu_parameter* out) {
    int n = 0;
    ((out[n++] = emu_describe<P>()), ...);
    return n;
}

template <class... P, size_t... I>
EMU_NOT_CHECKED void emu_call_unpacked(void (*kernel)(P...), void** values, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<P>*)values[I]...);
}
template <class... P>
EMU_NOT_CHECKED void emu_call(void (*kernel)(P...), void** values) {
    emu_call_unpacked(kernel, values, std::index_sequence_for<P...>());
}

#define EMU_EXPORT_KERNEL(KERNEL, BOUNDS)                                                                             \
    EMU_PUBLIC EMU_NOT_CHECKED void emu_call__##KERNEL(void** values) { emu_call(KERNEL, values); }                   \
    EMU_PUBLIC EMU_NOT_CHECKED int emu_signature__##KERNEL(emu_parameter* out) { return emu_signature(KERNEL, out); } \
    EMU_PUBLIC EMU_NOT_CHECKED int emu_bounds__##KERNEL() { return (BOUNDS); }
