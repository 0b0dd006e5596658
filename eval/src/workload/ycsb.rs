//! `ycsb:n`: YCSB as middlewares run it (GeoTP §VII-A2): `n` operations on distinct rows, each a
//! read or a blind update, in a table with a part in each region. Some transactions are
//! *distributed*: their rows are in two regions.
//!
//! The rows of a transaction that is not distributed are in any one region. With one round, the
//! operations are sent together, as a procedure. With several rounds, a general transaction reads
//! some of its rows in each round, those that it updates `FOR UPDATE`; the last round has the
//! updates.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Op, Reads, Value};

use super::options::{Priorities, bounded, share};
use super::places::Places;
use super::spread::{Zipf, chance};
use super::{Issuer, Options, Request, Step, Values, Workload, WorkloadError};

const CENTRALIZED: &str = "centralized";
const DISTRIBUTED: &str = "distributed";
const CENTRALIZED_ROUNDS: &str = "centralized-rounds";
const DISTRIBUTED_ROUNDS: &str = "distributed-rounds";
/// Names of general transactions that know their writes from the start ([`Request::to_txn`]).
pub(super) const IN_ROUNDS: [&str; 2] = [CENTRALIZED_ROUNDS, DISTRIBUTED_ROUNDS];

/// The number of operations in one transaction, if the name does not say.
const COUNT: u64 = 5;

/// The operations of one transaction: a function of its parameter.
struct Plan {
    is_distributed: bool,
    /// Rows in order, and whether each is only read.
    ops: Vec<(Key, bool)>,
}

/// The workload.
#[derive(Debug)]
pub struct Ycsb {
    count: usize,
    rows: Zipf,
    reads: f64,
    distributed: f64,
    rounds: usize,
    value_bytes: usize,
    priorities: Priorities,
    places: Places,
}

impl Ycsb {
    /// `parameter` (5) operations on rows of a table with `keys` (1 M) rows in each region, chosen
    /// by a Zipf distribution with exponent 0.9. A share `reads` (0.5) of them only reads. A share
    /// `distributed` (0.2) of the transactions has rows in two regions. The operations come in
    /// `rounds` (1) rounds. Rows have `value_bytes` (1000).
    ///
    /// # Errors
    /// If the parameter or an option makes no sense.
    pub fn new(parameter: Option<&str>, options: &Options) -> Result<Self, WorkloadError> {
        options.only("ycsb", &["keys", "zipf", "value_bytes", "reads", "distributed", "rounds"])?;
        let count = match parameter.map(str::parse) {
            None => COUNT,
            Some(Ok(count @ 1..=100)) => count,
            Some(_) => {
                return Err(WorkloadError::Parameter {
                    spec: format!("ycsb:{}", parameter.unwrap_or_default()),
                    problem: "the parameter must be the number of operations".into(),
                    remedy: "use a whole number from 1 to 100".into(),
                });
            }
        };
        let keys = bounded("keys", options.keys, 1_000_000, (count, 1 << 40))?;
        let size = |number| usize::try_from(number).unwrap_or(usize::MAX);
        Ok(Self {
            count: size(count),
            rows: Zipf::new(keys, options.theta(0.9)?),
            reads: share("reads", options.reads, 0.5)?,
            distributed: share("distributed", options.distributed, 0.2)?,
            rounds: size(bounded("rounds", options.rounds, 1, (1, 100))?),
            value_bytes: size(bounded("value_bytes", options.value_bytes, 1_000, (16, 65_536))?),
            priorities: options.priorities(&[CENTRALIZED, DISTRIBUTED])?,
            places: Places::alone(1),
        })
    }

    /// Rows of these regions in turn, all different.
    fn draw(&self, places: &[usize], rng: &mut Rng) -> Vec<Key> {
        let mut keys: Vec<Key> = Vec::new();
        for &place in places.iter().cycle().take(100 * self.count) {
            if keys.len() >= self.count {
                break;
            }
            let name = self.places.names(place).first().copied().unwrap_or_default();
            let key = Key::from(format!("usertable{{{name}}}:{}", self.rows.draw(rng)));
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        keys
    }

    fn plan(&self, parameter: u64) -> Plan {
        let mut rng = Rng::stream(parameter, "ycsb", 0);
        let rng = &mut rng;
        let count = self.places.all().count() as u64;
        let first = usize::try_from(rng.below(count)).unwrap_or_default();
        let mut places = vec![first];
        if chance(self.distributed, rng) && count > 1 {
            places.push(self.places.other(first, rng));
        }
        let keys = self.draw(&places, rng);
        let ops = keys.into_iter().map(|key| (key, chance(self.reads, rng))).collect();
        Plan { is_distributed: places.len() > 1, ops }
    }

    fn value(&self, parameter: u64) -> Value {
        let digits = format!("{parameter:016x}").into_bytes();
        digits.into_iter().cycle().take(self.value_bytes).collect::<Vec<u8>>().into()
    }

    fn writes(&self, request: &Request) -> Decision {
        let value = self.value(request.parameter);
        Decision::Commit(
            request.writes.iter().map(|key| (key.clone(), Some(value.clone()))).collect(),
        )
    }
}

impl Workload for Ycsb {
    fn name(&self) -> String {
        format!("ycsb:{}", self.count)
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn place(&mut self, cluster: &Cluster) {
        self.places = Places::of(cluster, 1);
    }

    fn next(&mut self, _: Issuer, rng: &mut Rng) -> Request {
        let parameter = rng.next_u64();
        let Plan { is_distributed, ops } = self.plan(parameter);
        let (name, in_rounds) = if is_distributed {
            (DISTRIBUTED, DISTRIBUTED_ROUNDS)
        } else {
            (CENTRALIZED, CENTRALIZED_ROUNDS)
        };
        let priority = self.priorities.draw(name, rng);
        let of = |wanted: bool| {
            ops.iter()
                .filter(|(_, is_read)| *is_read == wanted)
                .map(|(key, _)| key.clone())
                .collect::<Vec<Key>>()
        };
        let (reads, writes) = (of(true), of(false));
        if self.rounds > 1 {
            let reads = ops.into_iter().map(|(key, _)| key).take(self.chunk()).collect();
            return Request {
                name: in_rounds,
                kind: Kind::General,
                reads,
                writes,
                priority,
                parameter,
                scan: None,
            };
        }
        if writes.is_empty() {
            return Request {
                name,
                kind: Kind::ReadOnly,
                reads,
                writes,
                priority,
                parameter,
                scan: None,
            };
        }
        let value = self.value(parameter);
        let op = |(key, is_read)| if is_read { Op::Get(key) } else { Op::Put(key, value.clone()) };
        let ops = ops.into_iter().map(op).collect();
        Request { name, kind: Kind::Procedure(ops), reads, writes, priority, parameter, scan: None }
    }

    fn decide(&self, request: &Request, _reads: &Reads) -> Decision {
        self.writes(request)
    }

    fn step(&self, request: &Request, reads: &Reads) -> Step {
        let keys = self.plan(request.parameter).ops.into_iter().map(|(key, _)| key);
        let next: Vec<Key> =
            keys.filter(|key| !reads.contains_key(key)).take(self.chunk()).collect();
        if next.is_empty() { Step::Decide(self.writes(request)) } else { Step::Read(next) }
    }

    fn is_general(&self) -> bool {
        self.rounds > 1
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        for key in &request.reads {
            let read = reads.get(key).ok_or_else(|| format!("{key} was requested but not read"))?;
            let Some(value) = &read.value else { continue };
            let digits = value.0.get(..16).and_then(|digits| std::str::from_utf8(digits).ok());
            let parameter = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
            if parameter.is_none_or(|parameter| self.value(parameter) != *value) {
                return Err(format!("{key} holds {value}, which nobody wrote"));
            }
        }
        Ok(())
    }
}

impl Ycsb {
    /// The number of rows in each round but the last.
    fn chunk(&self) -> usize {
        self.count.div_ceil(self.rounds.saturating_sub(1).max(1))
    }
}
