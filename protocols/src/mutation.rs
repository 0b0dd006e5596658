//! Mutations: deliberate mistakes that the tests must catch, one at a time (ADR 35).
//!
//! Each protocol lists its mutations in its `mutations.rs`, with [`mutations!`]. A handler tests
//! one by its name, as in `config.mutations.skips_readers()`. Without the feature `mutations` none
//! can be enabled: every test is the constant `false`, and the compiler removes the unsafe code.

/// The names of mutations that can be enabled: all of these, or none without the feature
/// `mutations`.
pub(crate) const fn compiled(names: &'static [&'static str]) -> &'static [&'static str] {
    if cfg!(feature = "mutations") { names } else { &[] }
}

/// Declares `Mutations`. Each mutation has a comment that describes the mistake, its own name, and,
/// if it has any, further names by which callers can enable it. Several mutations may share a name.
macro_rules! mutations {
    ($($(#[$comment:meta])+ $mutation:ident $(: $($name:literal),+)?;)+) => {
        /// Mutations: deliberate mistakes that the tests must catch. None is enabled in real use.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[allow(clippy::struct_excessive_bools, reason = "independent switches")]
        pub struct Mutations {
            $($mutation: bool,)+
        }

        impl Mutations {
            $(
                $(#[$comment])+
                #[must_use]
                pub const fn $mutation(self) -> bool {
                    cfg!(feature = "mutations") && self.$mutation
                }
            )+

            /// True if any is enabled.
            #[must_use]
            pub fn is_any(self) -> bool {
                self != Self::default()
            }

            /// Enables every mutation that has this name.
            ///
            /// # Panics
            /// If there is none, or the feature `mutations` is off.
            pub fn enable(&mut self, name: &str) {
                assert!(cfg!(feature = "mutations"), "{name}: compiled without mutations");
                let mut is_known = false;
                $(
                    if [stringify!($mutation) $($(, $name)+)?].contains(&name) {
                        self.$mutation = true;
                        is_known = true;
                    }
                )+
                assert!(is_known, "there is no mutation {name:?}");
            }
        }
    };
}
pub(crate) use mutations;
