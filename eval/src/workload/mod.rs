//! Workloads: the transactions of clients, and the invariants of their results.
//!
//! A new workload is one file that implements [`Workload`], and one arm in [`parse`].

mod bank;
mod leases;
mod list_append;
mod movr;
mod options;
mod places;
mod properties;
mod ranges;
mod read_write;
mod replay;
mod retwis;
mod rows;
mod smallbank;
mod spread;
#[cfg(test)]
mod tests;
mod tpcc;
mod tpcc_check;
mod ycsb;
mod ycsbt;

use std::fmt::Debug;

use serde::Deserialize;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::scan::{KeyRange, Scan};
use orthodrome_core::spelling::did_you_mean;
use orthodrome_core::txn::{Decision, Key, Kind, Priority, Reads, Txn, Value};

pub use options::{Distribution, Form, Options, ReadOnlyAs};
pub use places::Reach;
pub use properties::read_properties;

/// The workloads that [`parse`] knows.
pub const NAMES: &[&str] = &[
    "ycsbt",
    "ycsb",
    "retwis",
    "smallbank",
    "tpcc",
    "movr",
    "bank",
    "list-append",
    "ranges",
    "leases",
];

/// The workload cannot be built.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No workload has that name.
    #[error(
        "unknown workload {0:?}{hint}; use one of {known}, or a file",
        hint = did_you_mean(.0, NAMES.iter().copied()),
        known = NAMES.join(", ")
    )]
    Unknown(String),
    /// The parameter after the colon in the name makes no sense.
    #[error("workload {spec:?}: {problem}; {remedy}")]
    Parameter {
        /// The whole name.
        spec: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// An option makes no sense.
    #[error("option `{field}`: {problem}; {remedy}")]
    Option {
        /// Its name.
        field: &'static str,
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// The text is not a workload file; the message says where and why.
    #[error("not a workload file: {0}")]
    Syntax(String),
}

/// The workload called `spec`: a name, for some with a parameter after a colon (`ycsbt:6`,
/// `list-append:dependent`, `tpcc:new-order`, `tpcc:payment`, `movr:begin-ride`).
///
/// # Errors
/// If the name or an option is wrong; the error says what to do.
pub fn parse(spec: &str, options: &Options) -> Result<Box<dyn Workload>, WorkloadError> {
    let (name, parameter) =
        spec.split_once(':').map_or((spec, None), |(name, after)| (name, Some(after)));
    let plain = || match parameter {
        None => Ok(()),
        Some(parameter) => Err(WorkloadError::Parameter {
            spec: spec.into(),
            problem: format!("{name} has no parameter, but {parameter:?} was given"),
            remedy: format!("use {name:?}"),
        }),
    };
    let workload = match name {
        "ycsbt" => boxed(ycsbt::Ycsbt::new(parameter, options)),
        "ycsb" => boxed(ycsb::Ycsb::new(parameter, options)),
        "retwis" => plain().and_then(|()| boxed(retwis::Retwis::new(options))),
        "smallbank" => plain().and_then(|()| boxed(smallbank::SmallBank::new(options))),
        "tpcc" => boxed(tpcc::Tpcc::new(parameter, options)),
        "movr" => boxed(movr::Movr::new(parameter, options)),
        "bank" => plain().and_then(|()| boxed(bank::Bank::new(options))),
        "list-append" => boxed(list_append::ListAppend::new(parameter, options)),
        "leases" => plain().and_then(|()| boxed(leases::Leases::new(options))),
        "ranges" => plain().and_then(|()| boxed(ranges::Ranges::new(options))),
        _ => Err(WorkloadError::Unknown(spec.into())),
    }?;
    Ok(read_as(workload, options))
}

/// The recorded transactions in `text`, a trace or a history (`replay.rs` defines the format),
/// called `name` in results.
///
/// # Errors
/// If a line or an option is wrong.
pub fn replay(
    name: &str,
    text: &str,
    options: &Options,
) -> Result<Box<dyn Workload>, WorkloadError> {
    Ok(read_as(boxed(replay::Replay::new(name, text, options))?, options))
}

fn read_as(workload: Box<dyn Workload>, options: &Options) -> Box<dyn Workload> {
    match options.read_only_as.unwrap_or_default() {
        ReadOnlyAs::ReadOnly => workload,
        how @ (ReadOnlyAs::ReadWrite | ReadOnlyAs::Stale) => {
            Box::new(read_write::ReadAs { workload, how })
        }
    }
}

fn boxed<W: Workload + 'static>(
    workload: Result<W, WorkloadError>,
) -> Result<Box<dyn Workload>, WorkloadError> {
    Ok(Box::new(workload?))
}

/// The content of a workload file.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The workload: `ycsbt:6`.
    pub workload: String,
    /// Its settings.
    #[serde(default)]
    pub options: Options,
    /// The relative share of transactions that clients in each region submit, by the region's name.
    /// If absent, all regions have the same share.
    #[serde(default)]
    pub origins: OrdMap<String, f64>,
    /// The goal of a plan for this workload.
    #[serde(default)]
    pub goal: Goal,
}

/// The goal of a plan.
#[derive(Clone, PartialEq, Default, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// The figure to optimize: `p95-high`.
    pub objective: Option<String>,
    /// How many regions may die.
    pub survive: Option<u32>,
    /// The price in dollars of a gigabyte (10⁹ bytes) that leaves a region for another, by region.
    /// Empty, or with an entry for each region.
    #[serde(default)]
    pub egress_price: OrdMap<String, f64>,
}

/// Reads a workload file.
///
/// # Errors
/// If the text is not a workload file; the error says where.
pub fn read_file(text: &str) -> Result<Description, WorkloadError> {
    toml::from_str(text).map_err(|error| WorkloadError::Syntax(error.to_string()))
}

/// The client that asks for a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Issuer {
    /// The client.
    pub client: ClientId,
    /// Its index among all clients of the run, from 0.
    pub index: u32,
    /// Its region.
    pub region: RegionId,
}

/// One transaction that a client wants to run. The client retries it under the same counter until
/// it commits or the retry policy gives up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Which of the workload's transactions this is: `transfer`, `post-tweet`, …
    pub name: &'static str,
    /// The kind of transaction: how its writes are determined.
    pub kind: Kind,
    /// Keys that it reads; for a general transaction, the keys of its first round.
    pub reads: Vec<Key>,
    /// Keys that it writes; for a general transaction, some keys that it may write.
    pub writes: Vec<Key>,
    /// Its priority.
    pub priority: Priority,
    /// A parameter of the workload: an amount, an element to append, …
    pub parameter: u64,
    /// If present, it scans or watches a range of keys, and declares no keys. Not every protocol can.
    pub scan: Option<Ranging>,
}

/// What a request does with a range of keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ranging {
    /// Read-only transactions find the keys and read them ([`orthodrome_core::scan`]).
    Scan(Scan),
    /// The client watches the range ([`orthodrome_core::watch`]), from where its previous watch ended, or
    /// else from now on. It ends after so many results, and when it has seen everything that was
    /// acknowledged when it began.
    Watch(KeyRange, u32),
}

impl Ranging {
    /// The range.
    #[must_use]
    pub fn range(&self) -> &KeyRange {
        match self {
            Self::Scan(scan) => &scan.range,
            Self::Watch(range, _) => range,
        }
    }
}

impl Request {
    /// True if it watches a range. That takes as long as others need to write there, so its duration is
    /// not the latency of a transaction.
    #[must_use]
    pub fn is_watch(&self) -> bool {
        matches!(self.scan, Some(Ranging::Watch(..)))
    }

    /// The request as a transaction with the given id.
    #[must_use]
    pub fn to_txn(&self, id: TxnId, home: RegionId, acknowledged_below: u64) -> Txn {
        let (reads, writes) = (self.reads.clone(), self.writes.clone());
        let mut txn = match &self.kind {
            Kind::Interactive => Txn::interactive(id, home, reads, writes),
            Kind::General => {
                let mut txn = Txn::general(id, home, reads);
                // `SELECT … FOR UPDATE`, if the protocol has it.
                if ycsb::IN_ROUNDS.contains(&self.name) {
                    txn.writes = writes;
                    txn.writes.sort_unstable();
                }
                txn
            }
            Kind::ReadOnly => Txn::read_only(id, home, reads),
            Kind::StaleReadOnly => Txn::stale_read_only(id, home, reads),
            Kind::Procedure(ops) => Txn::procedure(id, home, ops.clone()),
        };
        txn.priority = self.priority;
        txn.acknowledged_below = acknowledged_below;
        txn
    }

    /// Requests under one name that read all these keys at the end of a run, some keys in each
    /// request.
    fn checks(name: &'static str, keys: &[Key]) -> Vec<Self> {
        let request = |keys: &[Key]| Self {
            name,
            kind: Kind::ReadOnly,
            reads: keys.to_vec(),
            writes: Vec::new(),
            priority: Priority::LOW,
            parameter: 0,
            scan: None,
        };
        keys.chunks(CHECK_KEYS).map(request).collect()
    }
}

/// The number of keys that one request reads at the end of a run.
const CHECK_KEYS: usize = 500;

/// How a workload's values appear in a history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Values {
    /// Values are lists of 8-byte little-endian elements. Each transaction appends one element
    /// ([`Request::parameter`]) to each key that it writes. A black-box check is possible.
    Lists,
    /// Histories state which version each read saw: a white-box check.
    Versions,
}

/// The next step of the issuer of a general transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Another round of reads.
    Read(Vec<Key>),
    /// The decision, which ends the transaction.
    Decide(Decision),
}

/// A source of transactions.
pub trait Workload: Debug + Send {
    /// Its name, parameters included: `ycsbt:4`.
    fn name(&self) -> String;

    /// How its values appear in a history.
    fn values(&self) -> Values;

    /// Tells the workload which cluster it runs on, before the first request: a workload may have
    /// data in every region.
    fn place(&mut self, _cluster: &Cluster) {}

    /// The next transaction of `issuer`.
    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request;

    /// The decision of the issuer of an interactive transaction, given its reads. A pure function.
    fn decide(&self, request: &Request, reads: &Reads) -> Decision;

    /// The next step of the issuer of a general transaction, given the reads of all rounds so far.
    /// A pure function.
    fn step(&self, request: &Request, reads: &Reads) -> Step {
        Step::Decide(self.decide(request, reads))
    }

    /// True if some of its transactions are general. Not every protocol runs general transactions.
    fn is_general(&self) -> bool {
        false
    }

    /// True if some of its requests are scans ([`Request::scan`]). Not every protocol scans.
    fn has_scans(&self) -> bool {
        false
    }

    /// Checks the reads of one committed transaction against the workload's invariant, as far as
    /// they suffice.
    ///
    /// # Errors
    /// If the invariant does not hold.
    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String>;

    /// Read-only transactions to run at the end. [`Workload::audit`] checks each of them, and
    /// [`Workload::audit_end`] checks all their reads together. None if the workload does not check
    /// the whole database.
    fn final_requests(&self) -> Vec<Request> {
        Vec::new()
    }

    /// Checks the reads of all [`Workload::final_requests`] together. No other transaction may have
    /// run in between.
    ///
    /// # Errors
    /// If the invariant does not hold.
    fn audit_end(&self, _reads: &Reads) -> Result<(), String> {
        Ok(())
    }
}

/// The elements of a list value; none if its length is not a multiple of eight.
#[must_use]
pub fn list_elements(value: Option<&Value>) -> Option<Vec<u64>> {
    let bytes = value.map(|value| value.0.as_ref()).unwrap_or_default();
    let (elements, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| elements.iter().map(|element| u64::from_le_bytes(*element)).collect())
}
