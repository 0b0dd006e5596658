//! The memory of simulations.

use std::ffi::{c_int, c_long};

/// The number of the allocator's option `purge_delay`, in mimalloc 2.
const PURGE_DELAY: c_int = 15;

#[allow(unsafe_code)]
unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

/// From now on the allocator keeps freed memory for this process. Otherwise it returns parts of huge
/// pages to the system. A simulation needs them again soon, and then waits for page faults, and for
/// the tables of small pages (`docs/performance.md`).
#[allow(unsafe_code)]
pub(crate) fn keep_freed() {
    // SAFETY: the function only stores the number, and has no conditions. A negative one means never.
    unsafe { mi_option_set(PURGE_DELAY, -1) }
}
