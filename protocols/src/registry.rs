//! Every protocol by name, with what it claims.
//!
//! A protocol registers itself with one name in the list at the end of this file: it then runs in the
//! simulator, the swarm and real servers, and its encoding and golden traces are tested.

use orthodrome_core::Wire;
use orthodrome_core::machine::Protocol;

use crate::carousel::Carousel;
use crate::deterministic::Deterministic;
use crate::natto::Natto;
use crate::ocean_vista::OceanVista;
use crate::tapir::Tapir;
use crate::two_phase_locking::Locking;

/// What a protocol promises about the order of transactions.
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

/// What is known of a protocol before it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// The paper it comes from, and the sections it covers.
    pub paper: &'static str,
    /// What it promises; histories are held to it.
    pub guarantee: Guarantee,
    /// What the promise rests on.
    pub conditions: &'static str,
    /// Which transactions it runs natively.
    pub model: &'static str,
    /// Wide-area round trips of a transaction without conflicts or failures.
    pub round_trips: &'static str,
}

/// Something to do with a protocol that is known only by name.
pub trait Visitor {
    /// What comes of it.
    type Out;
    /// Does it.
    fn visit<P: Registered>(self, row: &'static Row) -> Self::Out;
}

/// A name that no protocol has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown protocol {name:?}; use one of {known}")]
pub struct UnknownProtocol {
    name: String,
    known: String,
}

impl UnknownProtocol {
    /// `name` is none of `known`.
    #[must_use]
    pub fn new<'a>(name: &str, known: impl Iterator<Item = &'a Row>) -> Self {
        let known = known.map(|row| row.name).collect::<Vec<_>>().join(", ");
        Self { name: name.into(), known }
    }
}

/// The row of the protocol called `name`.
///
/// # Errors
/// If there is none; the error lists those there are.
pub fn find(name: &str) -> Result<&'static Row, UnknownProtocol> {
    let found = rows().find(|row| row.name == name);
    found.ok_or_else(|| UnknownProtocol::new(name, rows()))
}

/// True if the protocol called `name` can divide a region's copy of everything into shares
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

/// A protocol that servers run and the simulator runs.
pub trait Registered: Protocol<Msg: Wire, Record: Wire> {
    /// What is known of it and of its variants: a row for each of [`Protocol::NAMES`].
    const ROWS: &'static [Row];
}

/// Every protocol of the list, in its order.
macro_rules! protocols {
    ($($protocol:ty),* $(,)?) => {
        /// What is known of every protocol.
        pub fn rows() -> impl Iterator<Item = &'static Row> {
            [$(<$protocol as Registered>::ROWS),*].into_iter().flatten()
        }

        /// Does something with the protocol called `name`.
        ///
        /// # Errors
        /// If there is no such protocol.
        pub fn with<V: Visitor>(name: &str, visitor: V) -> Result<V::Out, UnknownProtocol> {
            let row = find(name)?;
            $(
                if <$protocol as Protocol>::NAMES.contains(&name) {
                    return Ok(visitor.visit::<$protocol>(row));
                }
            )*
            unreachable!("{name} has a row, and its protocol does not name it")
        }
    };
}

// A new protocol is added here, and its module in `lib.rs`.
protocols![Carousel, Locking, Tapir, Natto, OceanVista, Deterministic];

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
}
