//! The operating system's information about its clocks and limits: system calls that the standard
//! library does not offer. The only unsafe code of the crate.

use std::time::Duration;

/// The machine's monotonic clock, in nanoseconds since a moment that all processes share while the
/// machine runs. Zero if the system has none.
#[allow(unsafe_code)]
pub(crate) fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec` through a pointer that is valid for that.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) } != 0;
    if failed {
        return 0;
    }
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanos.unwrap_or(0))
}

/// The error bound of the system clock, according to the kernel: the daemon that corrects the clock
/// states a bound (half of the round trip to its source, plus the dispersion), and the kernel has
/// added half a millisecond a second since then. None if no daemon corrects the clock, or the
/// system does not report it.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub(crate) fn clock_error() -> Option<Duration> {
    // SAFETY: a `timex` is a C struct of integers, for which zeros are valid.
    let mut state: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: with `modes` 0 the call changes nothing but the struct that the pointer is valid for.
    let status = unsafe { libc::adjtimex(&raw mut state) };
    let is_synchronised = status >= 0 && status != TIME_ERROR && state.status & STA_UNSYNC == 0;
    let micros = u64::try_from(state.maxerror).ok()?;
    is_synchronised.then(|| Duration::from_micros(micros))
}

/// The state of a clock that no daemon corrects.
#[cfg(target_os = "linux")]
const TIME_ERROR: i32 = 5;
/// The status bit of a clock that no daemon corrects.
#[cfg(target_os = "linux")]
const STA_UNSYNC: i32 = 0x40;

/// This system reports no bound.
#[cfg(not(target_os = "linux"))]
pub(crate) fn clock_error() -> Option<Duration> {
    None
}

/// An identity of everything that shares this process's monotonic clock: the boot of the machine,
/// and the time namespace. None if the system does not report it.
pub(crate) fn machine() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // Kernels without time namespaces have no such file, and one clock.
    let namespace = std::fs::read_link("/proc/self/ns/time");
    let namespace = namespace.map(|path| path.display().to_string()).unwrap_or_default();
    let boot = boot.trim();
    (!boot.is_empty()).then(|| format!("{boot} {namespace}"))
}

/// The number of files and connections that this process may have open, after raising it to the most
/// that the system allows: services often begin with 1 024 and may have many more.
#[allow(unsafe_code)]
pub(crate) fn open_files_max() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes one `rlimit` through a pointer that is valid for that.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return OPEN_FILES;
    }
    let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // SAFETY: the call reads one `rlimit` through a pointer that is valid for that.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } == 0 {
        limit = raised;
    }
    usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
}

/// What systems allow that do not say.
const OPEN_FILES: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monotonic_clock_advances_and_the_machine_has_one_name() {
        let first = monotonic();
        assert!(first > 0);
        std::thread::sleep(Duration::from_millis(2));
        assert!(monotonic() >= first + 2_000_000);
        assert_eq!(machine(), machine());
        // A bound, if there is one, is not zero.
        assert!(clock_error().is_none_or(|error| !error.is_zero()));
    }

    #[test]
    fn the_limit_of_open_files_is_raised_to_the_most_that_is_allowed() {
        let text = || std::fs::read_to_string("/proc/self/limits").unwrap();
        let raised = open_files_max();
        let limits = text();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let mut numbers = line.split_whitespace().filter_map(|word| word.parse::<usize>().ok());
        assert_eq!(numbers.next(), Some(raised));
        assert_eq!(numbers.next(), Some(raised), "the most that is allowed");
    }
}
