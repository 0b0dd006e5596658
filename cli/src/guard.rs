//! Turns a panic inside a simulation into a result, so that one failed assertion neither ends a
//! swarm nor prints over its progress bar.

use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::Once;

thread_local! {
    /// The panic message of this thread's guarded call; none outside of a guarded call.
    static FINDING: RefCell<Option<String>> = const { RefCell::new(None) };
}

static HOOK: Once = Once::new();

/// Calls `run`.
///
/// # Errors
/// `run` panicked: the message and its place in the source. Data that `run` had borrowed may then
/// be half changed.
pub fn guard<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    HOOK.call_once(|| {
        let otherwise = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let is_guarded = FINDING.with_borrow_mut(|finding| match finding {
                Some(text) => {
                    *text = describe(info);
                    true
                }
                None => false,
            });
            if !is_guarded {
                otherwise(info);
            }
        }));
    });
    FINDING.set(Some(String::new()));
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    let finding = FINDING.take().unwrap_or_default();
    result.map_err(|_| finding)
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let message = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    let place = info.location().map(|at| format!(" ({}:{})", at.file(), at.line()));
    format!("{message}{}", place.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message_and_place() {
        assert_eq!(guard(|| 7), Ok(7));
        let finding = guard(|| panic!("c4.19 is prepared {}", "twice")).unwrap_err();
        assert!(finding.starts_with("c4.19 is prepared twice (cli/src/guard.rs:"), "{finding}");
        assert_eq!(guard(|| 8), Ok(8));
    }
}
