//! The scripts that clients of a node have sent, for `EVALSHA`.
//!
//! A transaction carries the text of its scripts. So this is no part of any protocol: a node that
//! does not know a script answers `NOSCRIPT`, and the client sends the text.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::procedure::redis::reply::Failure;
use orthodrome_core::procedure::redis::script;

/// The most bytes of all scripts. Those that nobody has used for longest are forgotten.
const BYTES_MAX: usize = 16 << 20;
/// The length of a digest, in hexadecimal digits.
pub(super) const DIGEST_BYTES: usize = 40;
/// What a script counts besides its text.
const SCRIPT_BYTES: usize = 256;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Scripts(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// By digest: the text, and when it was used last.
    texts: OrdMap<String, (Bytes, u64)>,
    /// Digests by their last use.
    uses: OrdMap<u64, String>,
    bytes: usize,
    now: u64,
}

impl State {
    /// The text with this digest, which is used now.
    fn get(&mut self, digest: &str) -> Option<Bytes> {
        let (text, used) = self.texts.get_mut(digest)?;
        self.now += 1;
        if let Some(digest) = self.uses.remove(used) {
            self.uses.insert(self.now, digest);
        }
        *used = self.now;
        Some(text.clone())
    }

    fn add(&mut self, digest: String, text: Bytes) {
        self.now += 1;
        self.bytes += text.len() + SCRIPT_BYTES;
        self.uses.insert(self.now, digest.clone());
        self.texts.insert(digest, (text, self.now));
        while self.bytes > BYTES_MAX
            && let Some((_, oldest)) = self.uses.pop_first()
            && let Some((text, _)) = self.texts.remove(&oldest)
        {
            self.bytes -= text.len() + SCRIPT_BYTES;
        }
    }
}

impl Scripts {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that holds the lock can leave the state half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The text with this digest.
    pub(super) fn get(&self, digest: &[u8]) -> Option<Bytes> {
        let digest =
            std::str::from_utf8(digest).ok().filter(|digest| digest.len() == DIGEST_BYTES)?;
        self.lock().get(&digest.to_ascii_lowercase())
    }

    /// Keeps a text; its digest.
    ///
    /// # Errors
    /// It is no script.
    pub(super) fn add(&self, text: &Bytes) -> Result<String, Failure> {
        let digest = script::digest(text);
        if self.lock().get(&digest).is_none() {
            script::check(text)?;
            // Of its own: the text may be a part of a larger request.
            let text = Bytes::copy_from_slice(text);
            let mut state = self.lock();
            // Another client may have sent it in between.
            if state.get(&digest).is_none() {
                state.add(digest.clone(), text);
            }
        }
        Ok(digest)
    }

    /// Forgets all.
    pub(super) fn clear(&self) {
        *self.lock() = State::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_that_nobody_used_for_longest_are_forgotten() {
        let scripts = Scripts::default();
        let text =
            |number: usize| Bytes::from(format!("return '{number} {}'", "x".repeat(1 << 20)));
        let digests: Vec<String> =
            (0..15).map(|number| scripts.add(&text(number)).unwrap()).collect();
        let knows = |number: usize| scripts.get(digests[number].as_bytes()).is_some();
        assert!((0..15).all(knows));
        // The first one is used, and so the second one goes.
        assert!(knows(0));
        scripts.add(&text(15)).unwrap();
        assert!(!knows(1) && knows(0) && knows(2));
        let state = scripts.lock();
        assert!(state.bytes <= BYTES_MAX && state.texts.len() == state.uses.len());
        drop(state);
        assert_eq!(scripts.add(&text(0)).unwrap(), digests[0]);
        assert_eq!(scripts.lock().texts.len(), 15);
        scripts.clear();
        assert!(!knows(0));
        assert_eq!(scripts.lock().bytes, 0);
    }

    #[test]
    fn digests_may_be_in_capitals_and_nonsense_is_not_kept() {
        let scripts = Scripts::default();
        let digest = scripts.add(&Bytes::from("return 1")).unwrap();
        assert_eq!(digest, "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
        assert_eq!(scripts.get(digest.to_uppercase().as_bytes()).unwrap(), "return 1");
        assert_eq!(scripts.get(b"e0e1"), None);
        assert!(scripts.add(&Bytes::from("x y")).unwrap_err().0.contains("compiling"));
        assert_eq!(scripts.lock().texts.len(), 1);
    }
}
