//! Every protocol by name, with its guarantee.
//!
//! A protocol is registered by the line that declares its module in `lib.rs`: `build.rs` lists
//! every module whose folder implements [`Registered`]. The protocol then runs in the simulator,
//! the swarm and real servers, and the tests for all protocols include it
//! (`docs/adding-a-protocol.md`).

use orthodrome_core::Wire;
use orthodrome_core::machine::Protocol;
use orthodrome_core::spelling::did_you_mean;

/// A protocol's guarantee about the order of transactions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guarantee {
    /// Some serial order explains every result, and it agrees with real time.
    StrictSerializable,
    /// Some serial order explains every result.
    Serializable,
}

impl Guarantee {
    /// Its name on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StrictSerializable => "strict-serializable",
            Self::Serializable => "serializable",
        }
    }
}

/// Items of `impl Protocol` that every protocol of this crate has word for word, because it gives
/// its types these names and lists its mutations in `mutations.rs`.
macro_rules! protocol_items {
    () => {
        type Config = Config;
        type Msg = Msg;
        type Timer = Timer;
        type Record = Record;
        type Note = Note;
        type Client = Client;
        type Server = Server;

        fn mutations(name: &str) -> &'static [&'static str] {
            mutations::names(name)
        }

        fn enable_mutation(config: &mut Config, mutation: &str) {
            mutations::enable(config, mutation);
        }
    };
}
pub(crate) use protocol_items;

/// Facts about a protocol that are known before it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// Its paper, and the sections that it covers.
    pub paper: &'static str,
    /// Its guarantee, against which histories are checked.
    pub guarantee: Guarantee,
    /// The conditions of the guarantee.
    pub conditions: &'static str,
    /// The kinds of transactions that it runs natively.
    pub model: &'static str,
    /// Wide-area round trips of a transaction without conflicts or failures.
    pub round_trips: &'static str,
}

/// An operation on a protocol that is known only by name.
pub trait Visitor {
    /// The result.
    type Out;
    /// Runs the operation.
    fn visit<P: Registered>(self, row: &'static Row) -> Self::Out;
}

/// No protocol has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown protocol {name:?}{hint}; use one of {known}")]
pub struct UnknownProtocol {
    name: String,
    hint: String,
    known: String,
}

impl UnknownProtocol {
    /// The error for a `name` that is not among `known`.
    #[must_use]
    pub fn new<'a>(name: &str, known: impl Iterator<Item = &'a Row>) -> Self {
        let known: Vec<&str> = known.map(|row| row.name).collect();
        let hint = did_you_mean(name, known.iter().copied());
        Self { name: name.into(), hint, known: known.join(", ") }
    }
}

/// True if the protocol called `name` can divide a region's copy of the data into shares
/// ([`Protocol::SHARES`]).
///
/// # Errors
/// If there is no such protocol.
pub fn has_shares(name: &str) -> Result<bool, UnknownProtocol> {
    struct HasShares;

    impl Visitor for HasShares {
        type Out = bool;
        fn visit<P: Registered>(self, _: &'static Row) -> bool {
            P::SHARES
        }
    }

    with(name, HasShares)
}

/// The names of the protocols with shares, for people: `a, b or c`.
#[must_use]
pub fn names_with_shares() -> String {
    let names = rows().map(|row| row.name);
    let mut able: Vec<&str> = names.filter(|name| has_shares(name) == Ok(true)).collect();
    match (able.pop(), able.is_empty()) {
        (Some(last), false) => format!("{} or {last}", able.join(", ")),
        (Some(only), true) => only.into(),
        (None, _) => String::new(),
    }
}

/// The variants that costly tests run ([`Registered::REPRESENTATIVES`]).
pub fn representatives() -> impl Iterator<Item = &'static str> {
    struct Represents;

    impl Visitor for Represents {
        type Out = bool;
        fn visit<P: Registered>(self, row: &'static Row) -> bool {
            P::REPRESENTATIVES.contains(&row.name)
        }
    }

    rows().map(|row| row.name).filter(|name| with(name, Represents) == Ok(true))
}

/// A protocol that servers and the simulator can run.
pub trait Registered: Protocol<Msg: Wire, Record: Wire> {
    /// Facts about the protocol and its variants: a row for each of [`Protocol::NAMES`].
    const ROWS: &'static [Row];
    /// The variants that costly tests run, such as tests of real processes: one for each different
    /// path through the code.
    const REPRESENTATIVES: &'static [&'static str] = Self::NAMES;
    /// Mutations that random seeds catch: variant, mutation, and the number of seeds.
    const CAUGHT_WITHIN: &'static [(&'static str, &'static str, u64)] = &[];
}

/// Builds a registry of these protocols, in this order: the functions `rows`, `find` and `with`.
/// This module has the registry of all protocols; tests build one of protocols that are not
/// shipped.
#[macro_export]
macro_rules! protocols {
    ($($protocol:ty),* $(,)?) => {
        /// Facts about every protocol.
        pub fn rows() -> impl Iterator<Item = &'static $crate::registry::Row> {
            [$(<$protocol as $crate::registry::Registered>::ROWS),*].into_iter().flatten()
        }

        /// The row of the protocol called `name`.
        ///
        /// # Errors
        /// If there is none; the error lists the known names.
        pub fn find(
            name: &str,
        ) -> Result<&'static $crate::registry::Row, $crate::registry::UnknownProtocol> {
            let found = rows().find(|row| row.name == name);
            found.ok_or_else(|| $crate::registry::UnknownProtocol::new(name, rows()))
        }

        /// Runs an operation on the protocol called `name`.
        ///
        /// # Errors
        /// If there is no such protocol.
        pub fn with<V: $crate::registry::Visitor>(
            name: &str,
            visitor: V,
        ) -> Result<V::Out, $crate::registry::UnknownProtocol> {
            let row = find(name)?;
            $(
                if <$protocol as $crate::registry::Registered>::ROWS
                    .iter()
                    .any(|own| own.name == name)
                {
                    return Ok(visitor.visit::<$protocol>(row));
                }
            )*
            unreachable!("{name} has a row, and no protocol has that row")
        }
    };
}

// `protocols![…]` with every protocol.
include!(concat!(env!("OUT_DIR"), "/protocols.rs"));

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::time::Duration;
    use orthodrome_core::topology::Topology;

    use super::*;

    struct Name;

    impl Visitor for Name {
        type Out = &'static str;
        fn visit<P: Registered>(self, row: &'static Row) -> &'static str {
            let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
            let cluster = Cluster::spread(map, 1, 1, 3, 3).unwrap();
            P::name(&P::configure(&cluster, row.name))
        }
    }

    #[test]
    fn every_row_is_found_by_its_name() {
        for row in rows() {
            assert_eq!(with(row.name, Name), Ok(row.name));
        }
        let error = with("carousal", Name).unwrap_err().to_string();
        assert!(error.contains("carousal") && error.contains("carousel-basic"), "{error}");
    }

    #[test]
    fn names_are_listed_for_people() {
        assert_eq!(names_with_shares(), "calvin, slog, slog-consensus or sloth");
    }

    #[test]
    fn every_protocol_has_a_representative() {
        struct Count;
        impl Visitor for Count {
            type Out = usize;
            fn visit<P: Registered>(self, _: &'static Row) -> usize {
                P::NAMES.iter().filter(|name| P::REPRESENTATIVES.contains(name)).count()
            }
        }
        assert!(rows().all(|row| with(row.name, Count).unwrap() > 0));
    }
}
