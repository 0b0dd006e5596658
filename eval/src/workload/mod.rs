//! Workloads: what clients ask for, and what must hold of the answers.

use std::fmt::Debug;

use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Priority, Reads, Txn, Value};

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Issuer {
    /// The client.
    pub client: ClientId,
    /// Its index among all clients of the run, from 0.
    pub index: u32,
    /// Where it is.
    pub region: RegionId,
}

/// One transaction a client wants done; attempted again under the same counter until it commits or
/// the retry policy gives up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Which of the workload's transactions this is: `transfer`, `post-tweet`, …
    pub name: &'static str,
    /// How its writes come about.
    pub kind: Kind,
    /// Keys it reads.
    pub reads: Vec<Key>,
    /// Keys it writes.
    pub writes: Vec<Key>,
    /// How much it matters.
    pub priority: Priority,
    /// The workload's own parameter: an amount, an element to append, …
    pub parameter: u64,
}

impl Request {
    /// The request as a transaction of that name.
    #[must_use]
    pub fn to_txn(&self, id: TxnId, home: RegionId, acknowledged_below: u64) -> Txn {
        let (reads, writes) = (self.reads.clone(), self.writes.clone());
        let mut txn = match &self.kind {
            Kind::Interactive => Txn::interactive(id, home, reads, writes),
            Kind::ReadOnly => Txn::read_only(id, home, reads),
            Kind::Procedure(ops) => Txn::procedure(id, home, ops.clone()),
        };
        txn.priority = self.priority;
        txn.acknowledged_below = acknowledged_below;
        txn
    }
}

/// How a workload's values appear in a history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Values {
    /// Values are lists of 8-byte little-endian elements, each transaction appends one
    /// ([`Request::parameter`]) to each key it writes: a black-box check is possible.
    Lists,
    /// Histories keep which version each read saw: a white-box check.
    Versions,
}

/// A source of transactions.
pub trait Workload: Debug + Send {
    /// Its name, parameters included: `ycsbt:4`.
    fn name(&self) -> String;

    /// How its values appear in a history.
    fn values(&self) -> Values;

    /// The next transaction that `issuer` wants.
    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request;

    /// What the issuer of an interactive transaction answers to its reads. A function of its
    /// arguments alone.
    fn decide(&self, request: &Request, reads: &Reads) -> Decision;

    /// Checks what a committed transaction read against the workload's invariant, if it can tell.
    ///
    /// # Errors
    /// What does not hold.
    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String>;

    /// A read-only transaction whose [`Workload::audit`] judges the whole database at the end of a
    /// run, if the workload has such a thing.
    fn final_request(&self) -> Option<Request>;
}

/// The elements of a list value; none if its length is not a multiple of eight.
#[must_use]
pub fn list_elements(value: Option<&Value>) -> Option<Vec<u64>> {
    let bytes = value.map(|value| value.0.as_ref()).unwrap_or_default();
    let (elements, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| elements.iter().map(|element| u64::from_le_bytes(*element)).collect())
}
