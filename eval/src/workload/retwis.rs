//! `retwis`: the Twitter-like mix that TAPIR introduced (Carousel Table 2, Ocean Vista Table 3,
//! Natto §5.2.2).
//!
//! The tables give only the numbers of gets and puts. As in TAPIR's published client, the keys of a
//! transaction are ordered by popularity, the gets are on the first of them, and the puts are on
//! all. So an updating transaction also writes every key that it gets. Unlike there, the keys of a
//! transaction are always different, so that the numbers in the table hold.

use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Reads};

use super::options::{Priorities, bounded};
use super::rows::Rows;
use super::spread::{Spread, weighted};
use super::{Form, Issuer, Options, Request, Values, Workload, WorkloadError};

/// One kind of transaction.
#[derive(Clone, Copy, Debug)]
struct Profile {
    name: &'static str,
    /// The smallest and largest number of gets.
    gets: (u64, u64),
    puts: u64,
}

const MIX: &[(u64, Profile)] = &[
    (5, Profile { name: "add-user", gets: (1, 1), puts: 3 }),
    (15, Profile { name: "follow", gets: (2, 2), puts: 2 }),
    (30, Profile { name: "post", gets: (3, 3), puts: 5 }),
    (50, Profile { name: "timeline", gets: (1, 10), puts: 0 }),
];

/// Keys of the largest transaction.
const KEYS_MAX: u64 = 10;

/// The workload.
#[derive(Debug)]
pub struct Retwis {
    rows: Rows,
    spread: Spread,
    form: Form,
    priorities: Priorities,
}

impl Retwis {
    /// The mix over `keys` keys (1 M) chosen by `distribution` (Zipf with exponent 0.65).
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(options: &Options) -> Result<Self, WorkloadError> {
        options.only(
            "retwis",
            &[
                "keys",
                "zipf",
                "keys_per_rank",
                "rank_share",
                "distribution",
                "contention_index",
                "key_bytes",
                "value_bytes",
                "form",
            ],
        )?;
        let keys = bounded("keys", options.keys, 1_000_000, (1, 1 << 40))?;
        let names: Vec<&str> = MIX.iter().map(|(_, profile)| profile.name).collect();
        Ok(Self {
            rows: Rows::new(options)?,
            spread: options.spread(keys, 0.65, KEYS_MAX)?,
            form: options.form.unwrap_or_default(),
            priorities: options.priorities(&names)?,
        })
    }
}

impl Workload for Retwis {
    fn name(&self) -> String {
        "retwis".into()
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let Some(&Profile { name, gets: (low, high), puts }) = weighted(MIX, rng) else {
            unreachable!("the weights of the mix add up to 100")
        };
        let gets = rng.range(low, high);
        let count = usize::try_from(gets.max(puts)).unwrap_or(usize::MAX);
        let mut picked = self.spread.pick(count, issuer, rng);
        picked.sort_unstable();
        let mut reads = self.rows.keys(&picked);
        let priority = self.priorities.draw(name, rng);
        let writes = if puts == 0 { Vec::new() } else { reads.clone() };
        reads.truncate(usize::try_from(gets).unwrap_or(usize::MAX));
        self.rows.request((name, priority), reads, writes, self.form, rng)
    }

    fn decide(&self, request: &Request, _reads: &Reads) -> Decision {
        self.rows.decide(request)
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        self.rows.audit(request, reads)
    }
}
