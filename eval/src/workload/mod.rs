//! Workloads: what clients ask for, and what must hold of the answers.
//!
//! A new workload is one file that implements [`Workload`] and one arm in [`parse`].

mod bank;
mod list_append;
mod movr;
mod options;
mod places;
mod properties;
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

use std::collections::BTreeMap;
use std::fmt::Debug;

use serde::Deserialize;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Priority, Reads, Txn, Value};

pub use options::{Distribution, Form, Options, ReadOnlyAs};
pub use places::Reach;
pub use properties::read_properties;

/// The workloads that [`parse`] knows.
pub const NAMES: &[&str] =
    &["ycsbt", "ycsb", "retwis", "smallbank", "tpcc", "movr", "bank", "list-append"];

/// A workload that cannot be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No workload has that name.
    #[error("unknown workload {0:?}; use one of {known}, or a file", known = NAMES.join(", "))]
    Unknown(String),
    /// What follows the colon in the name makes no sense.
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
    /// Not a workload file; the text says where and why.
    #[error("not a workload file: {0}")]
    Syntax(String),
}

/// The workload called `spec`: a name, for some with a parameter after a colon (`ycsbt:6`,
/// `list-append:dependent`, `tpcc:new-order`, `tpcc:payment`, `movr:begin-ride`).
///
/// # Errors
/// What is wrong with the name or an option, and what to do.
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
        _ => Err(WorkloadError::Unknown(spec.into())),
    }?;
    Ok(read_as(workload, options))
}

/// The recorded transactions in `text`, a trace or a history (`replay.rs` has the form), called `name` in results.
///
/// # Errors
/// What is wrong in which line, or with an option.
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

/// What a workload file says.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The workload: `ycsbt:6`.
    pub workload: String,
    /// Its settings.
    #[serde(default)]
    pub options: Options,
    /// Which share of the transactions begins in each region, by name, in proportion; the same everywhere if absent.
    #[serde(default)]
    pub origins: BTreeMap<String, f64>,
    /// What matters, for whoever plans a cluster for it.
    #[serde(default)]
    pub goal: Goal,
}

/// What matters of a cluster.
#[derive(Clone, PartialEq, Default, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// The figure that is to be best: `p95-high`.
    pub objective: Option<String>,
    /// How many regions may die.
    pub survive: Option<u32>,
    /// What a gigabyte (10⁹ bytes) costs that leaves a region for another, in dollars, by region; if anything is
    /// said, something is of each region.
    #[serde(default)]
    pub egress_price: BTreeMap<String, f64>,
}

/// Reads a workload file.
///
/// # Errors
/// What is wrong with the text, and where.
pub fn read_file(text: &str) -> Result<Description, WorkloadError> {
    toml::from_str(text).map_err(|error| WorkloadError::Syntax(error.to_string()))
}

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
    /// Keys it reads; of a general transaction those of its first round.
    pub reads: Vec<Key>,
    /// Keys it writes; of a general transaction some that it may.
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
            Kind::General => {
                let mut txn = Txn::general(id, home, reads);
                // `SELECT … FOR UPDATE`, where the protocol has it.
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

    /// Reads of all these keys at the end of a run, some at a time, under one name.
    fn checks(name: &'static str, keys: &[Key]) -> Vec<Self> {
        let request = |keys: &[Key]| Self {
            name,
            kind: Kind::ReadOnly,
            reads: keys.to_vec(),
            writes: Vec::new(),
            priority: Priority::LOW,
            parameter: 0,
        };
        keys.chunks(CHECK_KEYS).map(request).collect()
    }
}

/// Keys of one read at the end of a run.
const CHECK_KEYS: usize = 500;

/// How a workload's values appear in a history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Values {
    /// Values are lists of 8-byte little-endian elements, each transaction appends one
    /// ([`Request::parameter`]) to each key it writes: a black-box check is possible.
    Lists,
    /// Histories keep which version each read saw: a white-box check.
    Versions,
}

/// What the issuer of a general transaction wants next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Another round of reads.
    Read(Vec<Key>),
    /// The end.
    Decide(Decision),
}

/// A source of transactions.
pub trait Workload: Debug + Send {
    /// Its name, parameters included: `ycsbt:4`.
    fn name(&self) -> String;

    /// How its values appear in a history.
    fn values(&self) -> Values;

    /// Says where its keys lie, before it is asked for anything: a workload may have data in every region.
    fn place(&mut self, _cluster: &Cluster) {}

    /// The next transaction that `issuer` wants.
    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request;

    /// What the issuer of an interactive transaction answers to its reads. A function of its
    /// arguments alone.
    fn decide(&self, request: &Request, reads: &Reads) -> Decision;

    /// What the issuer of a general transaction wants after it has read this much, in all rounds so
    /// far. A function of its arguments alone.
    fn step(&self, request: &Request, reads: &Reads) -> Step {
        Step::Decide(self.decide(request, reads))
    }

    /// True if some of its transactions are general, which not every protocol runs.
    fn is_general(&self) -> bool {
        false
    }

    /// Checks what a committed transaction read against the workload's invariant, if it can tell.
    ///
    /// # Errors
    /// What does not hold.
    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String>;

    /// Read-only transactions whose [`Workload::audit`] judges the whole database at the end of a run,
    /// one by one, and then [`Workload::audit_end`] what all of them read; none if the workload has no
    /// such thing.
    fn final_requests(&self) -> Vec<Request> {
        Vec::new()
    }

    /// Checks what the [`Workload::final_requests`] read together, when nothing else happened meanwhile.
    ///
    /// # Errors
    /// What does not hold.
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
