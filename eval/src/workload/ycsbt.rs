//! `ycsbt:n`: YCSB+T as TAPIR, Carousel, Natto and Ocean Vista run it: `n` read-modify-writes on
//! distinct keys (Carousel §6.2; Ocean Vista §6.1; Natto §5.2.1).
//!
//! The new value is drawn together with the transaction, so that the interactive form and the
//! procedure (gets, then puts) write the same.
//!
//! With the option `deletes`, some transactions delete their first key. Histories name the version
//! of each read and write, and a deletion is a version too, so they are checked like all others.

use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Reads};

use super::options::{Priorities, bounded, share};
use super::rows::Rows;
use super::spread::{Spread, chance};
use super::{Form, Issuer, Options, Request, Values, Workload, WorkloadError};

const MODIFY: &str = "read-modify-write";
const READ: &str = "read";
const DELETE: &str = "delete";

/// The number of read-modify-writes in one transaction, if the name does not say.
const COUNT: u64 = 4;

/// The workload.
#[derive(Debug)]
pub struct Ycsbt {
    count: usize,
    rows: Rows,
    spread: Spread,
    read_only: f64,
    deletes: f64,
    form: Form,
    priorities: Priorities,
}

impl Ycsbt {
    /// `parameter` (4) read-modify-writes on `keys` keys (1 M) chosen by `distribution` (Zipf with
    /// exponent 0.65). A share `read_only` (0) of the transactions only reads. Of the
    /// others, a share `deletes` (0) deletes its first key, half of them without reading it.
    ///
    /// # Errors
    /// If the parameter or an option makes no sense.
    pub fn new(parameter: Option<&str>, options: &Options) -> Result<Self, WorkloadError> {
        options.only(
            "ycsbt",
            &[
                "keys",
                "zipf",
                "keys_per_rank",
                "rank_share",
                "distribution",
                "contention_index",
                "key_bytes",
                "value_bytes",
                "read_only",
                "form",
                "deletes",
            ],
        )?;
        let count = match parameter.map(str::parse) {
            None => COUNT,
            Some(Ok(count @ 1..=100)) => count,
            Some(_) => {
                return Err(WorkloadError::Parameter {
                    spec: format!("ycsbt:{}", parameter.unwrap_or_default()),
                    problem: "the parameter must be the number of read-modify-writes".into(),
                    remedy: "use a whole number from 1 to 100".into(),
                });
            }
        };
        let keys = bounded("keys", options.keys, 1_000_000, (1, 1 << 40))?;
        Ok(Self {
            count: usize::try_from(count).unwrap_or(usize::MAX),
            rows: Rows::new(options)?,
            spread: options.spread(keys, 0.65, count)?,
            read_only: share("read_only", options.read_only, 0.0)?,
            deletes: share("deletes", options.deletes, 0.0)?,
            form: options.form.unwrap_or_default(),
            priorities: options.priorities(&[MODIFY, READ, DELETE])?,
        })
    }
}

impl Workload for Ycsbt {
    fn name(&self) -> String {
        format!("ycsbt:{}", self.count)
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let is_read_only = chance(self.read_only, rng);
        let picked = self.spread.pick(self.count, issuer, rng);
        let keys = self.rows.keys(&picked);
        // Without deletions nothing more is drawn, so that the draws of other configurations stay
        // the same.
        if !is_read_only && self.deletes > 0.0 && chance(self.deletes, rng) {
            let priority = self.priorities.draw(DELETE, rng);
            return self.rows.request_deleting((DELETE, priority), keys, self.form, rng);
        }
        let name = if is_read_only { READ } else { MODIFY };
        let priority = self.priorities.draw(name, rng);
        let writes = if is_read_only { Vec::new() } else { keys.clone() };
        self.rows.request((name, priority), keys, writes, self.form, rng)
    }

    fn decide(&self, request: &Request, _reads: &Reads) -> Decision {
        if request.name == DELETE {
            return self.rows.decide_deleting(request);
        }
        self.rows.decide(request)
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        self.rows.audit(request, reads)
    }
}
