//! Settings of workloads: one flat table. Each workload uses the settings that it knows, and
//! refuses the others.

use serde::{Deserialize, Serialize};

use orthodrome_core::rng::Rng;
use orthodrome_core::txn::Priority;

use super::WorkloadError;
use super::spread::{Spread, Zipf, chance};

/// The kind of a workload's transactions.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// The client receives the reads, and answers with its writes.
    #[default]
    Interactive,
    /// Guarded operations, sent in one request.
    Procedure,
    /// Half of each, drawn for every transaction.
    Mixed,
}

/// The kind of transactions that only read.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadOnlyAs {
    /// Read-only transactions: the protocol may have a shorter path for them.
    #[default]
    ReadOnly,
    /// Interactive transactions without writes, which prepare and commit like any other. Prototypes
    /// without a read-only path do this.
    ReadWrite,
    /// Stale reads: reads of any consistent state, however old
    /// ([`orthodrome_core::txn::Kind::StaleReadOnly`]).
    Stale,
}

/// How keys are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// Each key by a Zipf distribution with exponent `zipf`.
    #[default]
    Zipf,
    /// One hot key and otherwise cold ones. A share `contention_index` of all keys is hot (Ocean
    /// Vista §6.1).
    ContentionIndex,
    /// The same, but each client has its own hot key and its own cold keys (Ocean Vista §6.2.3).
    ContentionIndexFixed,
}

/// Settings of a workload. A setting that is absent has the workload's own default.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The number of keys: of accounts for `bank`, of users for `smallbank`, of lists in use for
    /// `list-append`, of the newest keys for `ranges`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
    /// Zipf exponent, from 0 (uniform) to 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zipf: Option<f64>,
    /// How many keys share each rank of the Zipf distribution, all equally likely; 1 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys_per_rank: Option<u64>,
    /// With `keys_per_rank`: the share of the draws that choose among the keys of their rank; the
    /// other draws take the key whose number is the rank. 1 if absent. With as many keys a rank as
    /// there are partitions, and 0.35, keys are nearly as popular as in Natto's published
    /// generator. (There, the search for a rank mostly returns before the rank is spread.)
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_share: Option<f64>,
    /// How keys are chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distribution: Option<Distribution>,
    /// Share of the keys that are hot, if `distribution` is one of the contention indexes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contention_index: Option<f64>,
    /// Length of a key in bytes, from 16 to 1024.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_bytes: Option<u64>,
    /// Length of a value in bytes, from 16 to 65536.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_bytes: Option<u64>,
    /// Share of transactions with high priority; 0.1 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high_priority: Option<f64>,
    /// Names of the transactions that have high priority; all others have low priority. Instead of
    /// `high_priority`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high_priority_names: Option<Vec<String>>,
    /// Share of transactions that only read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<f64>,
    /// `ranges`: share of the transactions that scan a range of keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scans: Option<f64>,
    /// The kind of transactions that only read; read-only if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only_as: Option<ReadOnlyAs>,
    /// `ycsb`: share of the operations that only read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<f64>,
    /// `ycsb`: share of the transactions that have rows in two regions. `tpcc`: share of NewOrder
    /// and Payment that have rows in two regions; each has its warehouse in any region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distributed: Option<f64>,
    /// `ycsb`: rounds in which the operations of a transaction are sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u64>,
    /// The kind of transactions; interactive if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub form: Option<Form>,
    /// `bank`: number of accounts in one transfer, from 2; the first pays all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accounts_per_transfer: Option<u64>,
    /// `list-append`: number of appends to one key before a fresh key replaces it; from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub appends_per_key: Option<u64>,
    /// `list-append`: share of the appending transactions that are general: they append to a list
    /// that depends on their first read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dependent: Option<f64>,
    /// `bank`, `ycsbt`, `ranges`: share of the writing transactions that delete keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletes: Option<f64>,
    /// `smallbank`: number of hot users.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_users: Option<u64>,
    /// `smallbank`: share of transactions on hot users.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_share: Option<f64>,
    /// `tpcc`: number of warehouses in each region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warehouses: Option<u64>,
    /// `tpcc`: share of NewOrder; the other transactions keep their proportions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_order_share: Option<f64>,
    /// `tpcc`: share of the orders that take exactly one line from another warehouse; if absent,
    /// each line is of another warehouse with a probability of 1 %.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multi_warehouse: Option<f64>,
    /// `tpcc`: of the transactions over two warehouses, the share over two regions; if absent, the
    /// other warehouse is any. `movr`: share of the rides in another region, two thirds of them in
    /// a close one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multi_region: Option<f64>,
    /// `tpcc`: share of the orders for an item that does not exist; they abort.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollbacks: Option<f64>,
    /// `movr`: number of cities in each region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cities: Option<u64>,
    /// `movr`: number of users in each region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub users: Option<u64>,
    /// `movr`: number of vehicles in each region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vehicles: Option<u64>,
    /// `movr`: share of the rides in a close region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p_close: Option<f64>,
    /// `movr`: share of the rides in a far region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p_far: Option<f64>,
}

/// Lists each of these fields by its name, and whether it is present. It destructures the options,
/// so that a new field cannot be forgotten.
macro_rules! present {
    ($options:expr; $($field:ident),* $(,)?) => {{
        let Options { $($field),* } = $options;
        [$((stringify!($field), $field.is_some())),*]
    }};
}

impl Options {
    /// Names of the settings that are present.
    fn present(&self) -> Vec<&'static str> {
        present! {
            self;
            keys, zipf, keys_per_rank, rank_share, distribution, contention_index, key_bytes,
            value_bytes, high_priority, high_priority_names, read_only, scans, read_only_as, reads,
            distributed, rounds, form, accounts_per_transfer, appends_per_key, dependent,
            deletes, hot_users, hot_share, warehouses, new_order_share, multi_warehouse, multi_region,
            rollbacks, cities, users, vehicles, p_close, p_far,
        }
        .into_iter()
        .filter_map(|(name, is_present)| is_present.then_some(name))
        .collect()
    }

    /// Refuses settings that `workload` does not know. It knows `known`, and the settings that
    /// every workload has.
    pub(super) fn only(&self, workload: &str, known: &[&str]) -> Result<(), WorkloadError> {
        let common = ["high_priority", "high_priority_names", "read_only_as"];
        for field in self.present() {
            if !common.contains(&field) && !known.contains(&field) {
                return Err(WorkloadError::Option {
                    field,
                    problem: format!("not an option of `{workload}`"),
                    remedy: format!("remove it, or use {}", known.join(", ")),
                });
            }
        }
        Ok(())
    }

    /// Which transactions have high priority, in a workload whose transactions have these names.
    pub(super) fn priorities(&self, names: &[&str]) -> Result<Priorities, WorkloadError> {
        let Some(high) = &self.high_priority_names else {
            return Ok(Priorities::Share(share("high_priority", self.high_priority, 0.1)?));
        };
        if self.high_priority.is_some() {
            return Err(WorkloadError::Option {
                field: "high_priority_names",
                problem: "conflicts with `high_priority`".into(),
                remedy: "remove one of the two".into(),
            });
        }
        match high.iter().find(|name| !names.contains(&name.as_str())) {
            Some(unknown) => Err(WorkloadError::Option {
                field: "high_priority_names",
                problem: format!("the workload has no transaction {unknown:?}"),
                remedy: format!("use some of {}", names.join(", ")),
            }),
            None => Ok(Priorities::Names(high.clone())),
        }
    }

    /// How keys are chosen from `keys` keys; every transaction must find `per_txn` different ones.
    pub(super) fn spread(
        &self,
        keys: u64,
        zipf: f64,
        per_txn: u64,
    ) -> Result<Spread, WorkloadError> {
        let distribution = self.distribution.unwrap_or_default();
        let index = |is_fixed| {
            let of_zipf = [
                ("zipf", self.zipf.is_some()),
                ("keys_per_rank", self.keys_per_rank.is_some()),
                ("rank_share", self.rank_share.is_some()),
            ];
            if let Some((field, _)) = of_zipf.into_iter().find(|(_, is_present)| *is_present) {
                return Err(WorkloadError::Option {
                    field,
                    problem: "not an option of a contention-index distribution".into(),
                    remedy: "remove it, or set `distribution` to \"zipf\"".into(),
                });
            }
            let index = share("contention_index", self.contention_index, 0.001)?;
            Spread::contention_index(keys, index, is_fixed)
        };
        let spread = match distribution {
            Distribution::Zipf if self.contention_index.is_some() => {
                return Err(WorkloadError::Option {
                    field: "contention_index",
                    problem: "not an option of a Zipf distribution".into(),
                    remedy: "remove it, or set `distribution` to \"contention-index\" or \
                             \"contention-index-fixed\""
                        .into(),
                });
            }
            Distribution::Zipf => {
                let keys_per_rank = bounded("keys_per_rank", self.keys_per_rank, 1, (1, keys))?;
                if !keys.is_multiple_of(keys_per_rank) {
                    return Err(WorkloadError::Option {
                        field: "keys_per_rank",
                        problem: format!("{keys} keys are not a multiple of {keys_per_rank}"),
                        remedy: "use a divisor of the number of keys".into(),
                    });
                }
                let ranks = Zipf::new(keys / keys_per_rank, self.theta(zipf)?);
                let rank_share = share("rank_share", self.rank_share, 1.0)?;
                Spread::Zipf { ranks, keys_per_rank, rank_share }
            }
            Distribution::ContentionIndex => index(false)?,
            Distribution::ContentionIndexFixed => index(true)?,
        };
        if spread.widest() < per_txn {
            return Err(WorkloadError::Option {
                field: "keys",
                problem: format!(
                    "with {keys} keys a transaction can find {} different ones; it needs {per_txn}",
                    spread.widest()
                ),
                remedy: "use more keys".into(),
            });
        }
        Ok(spread)
    }

    /// The Zipf exponent.
    pub(super) fn theta(&self, default: f64) -> Result<f64, WorkloadError> {
        let theta = self.zipf.unwrap_or(default);
        if (0.0..=10.0).contains(&theta) {
            return Ok(theta);
        }
        Err(WorkloadError::Option {
            field: "zipf",
            problem: format!("{theta} is not a Zipf exponent"),
            remedy: "use a number from 0 (uniform) to 10".into(),
        })
    }
}

/// A share, checked to lie between 0 and 1.
pub(super) fn share(
    field: &'static str,
    value: Option<f64>,
    default: f64,
) -> Result<f64, WorkloadError> {
    let value = value.unwrap_or(default);
    if (0.0..=1.0).contains(&value) {
        return Ok(value);
    }
    Err(WorkloadError::Option {
        field,
        problem: format!("{value} is not a share"),
        remedy: "use a number from 0 to 1".into(),
    })
}

/// A number, checked to lie in `low..=high`.
pub(super) fn bounded(
    field: &'static str,
    value: Option<u64>,
    default: u64,
    (low, high): (u64, u64),
) -> Result<u64, WorkloadError> {
    let value = value.unwrap_or(default);
    if (low..=high).contains(&value) {
        return Ok(value);
    }
    Err(WorkloadError::Option {
        field,
        problem: format!("{value} is out of range"),
        remedy: format!("use a whole number from {low} to {high}"),
    })
}

impl Form {
    /// True if the next transaction is to be a procedure.
    pub(super) fn draw_procedure(self, rng: &mut Rng) -> bool {
        match self {
            Self::Interactive => false,
            Self::Procedure => true,
            Self::Mixed => rng.chance(1, 2),
        }
    }
}

/// Which transactions have high priority.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Priorities {
    /// This share of them, drawn for every transaction.
    Share(f64),
    /// The transactions with these names.
    Names(Vec<String>),
}

impl Priorities {
    /// The priority of a transaction called `name`.
    pub(super) fn draw(&self, name: &str, rng: &mut Rng) -> Priority {
        let is_high = match self {
            Self::Share(share) => chance(*share, rng),
            Self::Names(names) => names.iter().any(|high| high == name),
        };
        if is_high { Priority::HIGH } else { Priority::LOW }
    }
}
