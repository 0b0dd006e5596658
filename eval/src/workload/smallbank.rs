//! `smallbank`: M. Cahill's banking benchmark (SIGMOD 2008, "Serializable Isolation for Snapshot
//! Databases") in the form of OLTP-Bench, which adds payments between users (Natto §5.2.3).
//!
//! Every user has a savings and a checking account. Each is one key, and if keys are hashed both
//! lie in one partition. Values are cents as decimal numbers, and a missing key is an account with
//! its initial balance. The writes of a transaction depend on its reads by more than addition, so
//! there is no procedure form. Protocols that need procedures run interactive transactions by
//! reconnaissance.
//!
//! A transaction that finds too little money commits without writing, where OLTP-Bench aborts. The
//! refusal is an answer too, and only a commit guarantees that its reads were consistent. This also
//! separates refusals, which become frequent as amalgamations empty the hot users' accounts, from
//! aborts by the protocol.
//!
//! Checking accounts may be overdrawn. But no transaction pays into savings, or takes more from
//! them than they hold, so savings always lie between zero and the initial balance.

use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Reads, Value, Writes};

use super::options::{Priorities, bounded, share};
use super::spread::{chance, weighted};
use super::{Issuer, Options, Request, Values, Workload, WorkloadError};

/// The initial balance of every account, in cents: 10 000.00, the least that OLTP-Bench gives.
pub const INITIAL_CENTS: i64 = 1_000_000;

/// The penalty for an overdraft, in cents.
const PENALTY_CENTS: i64 = 100;

/// The transactions; amounts are OLTP-Bench's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    /// Moves everything one user has to another user's checking account.
    Amalgamate,
    /// Reads both accounts.
    Balance,
    /// Pays 1.30 into checking.
    DepositChecking,
    /// Moves 5.00 between two users' checking accounts, if the payer has it.
    SendPayment,
    /// Takes 20.20 from savings, if they hold so much.
    TransactSavings,
    /// Takes 5.00 from checking, and a penalty if the two accounts together hold less.
    WriteCheck,
}

impl Action {
    const ALL: [Self; 6] = [
        Self::Amalgamate,
        Self::Balance,
        Self::DepositChecking,
        Self::SendPayment,
        Self::TransactSavings,
        Self::WriteCheck,
    ];

    /// OLTP-Bench's weights, in per cent.
    const MIX: [(u64, Self); 6] = [
        (15, Self::Amalgamate),
        (15, Self::Balance),
        (15, Self::DepositChecking),
        (25, Self::SendPayment),
        (15, Self::TransactSavings),
        (15, Self::WriteCheck),
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Amalgamate => "amalgamate",
            Self::Balance => "balance",
            Self::DepositChecking => "deposit-checking",
            Self::SendPayment => "send-payment",
            Self::TransactSavings => "transact-savings",
            Self::WriteCheck => "write-check",
        }
    }

    fn cents(self) -> u64 {
        match self {
            Self::Amalgamate | Self::Balance => 0,
            Self::DepositChecking => 130,
            Self::SendPayment | Self::WriteCheck => 500,
            Self::TransactSavings => 2_020,
        }
    }

    /// Keys read and keys written; `a` and `b` are users.
    fn keys(self, a: u64, b: u64) -> (Vec<Key>, Vec<Key>) {
        match self {
            Self::Amalgamate => {
                let keys = vec![savings(a), checking(a), checking(b)];
                (keys.clone(), keys)
            }
            Self::Balance => (vec![savings(a), checking(a)], Vec::new()),
            Self::DepositChecking => (vec![checking(a)], vec![checking(a)]),
            Self::SendPayment => {
                let keys = vec![checking(a), checking(b)];
                (keys.clone(), keys)
            }
            Self::TransactSavings => (vec![savings(a)], vec![savings(a)]),
            Self::WriteCheck => (vec![savings(a), checking(a)], vec![checking(a)]),
        }
    }

    /// New balances of the write keys, given the balances of the read keys, both in the order of
    /// [`Action::keys`]; none if there is too little money.
    fn after(self, before: &[i64], cents: i64) -> Option<Vec<i64>> {
        match (self, before) {
            (Self::Amalgamate, &[savings, checking, other]) => {
                Some(vec![0, 0, other + savings + checking])
            }
            (Self::Balance, _) => Some(Vec::new()),
            (Self::DepositChecking, &[checking]) => Some(vec![checking + cents]),
            (Self::SendPayment, &[payer, payee]) => {
                (payer >= cents).then(|| vec![payer - cents, payee + cents])
            }
            (Self::TransactSavings, &[savings]) => {
                (savings >= cents).then(|| vec![savings - cents])
            }
            (Self::WriteCheck, &[savings, checking]) => {
                let penalty = if savings + checking < cents { PENALTY_CENTS } else { 0 };
                Some(vec![checking - cents - penalty])
            }
            // Cannot happen: `decide` checks the number of balances.
            (
                Self::Amalgamate
                | Self::DepositChecking
                | Self::SendPayment
                | Self::TransactSavings
                | Self::WriteCheck,
                _,
            ) => None,
        }
    }
}

fn savings(user: u64) -> Key {
    format!("savings{{{user}}}").into()
}

fn checking(user: u64) -> Key {
    format!("checking{{{user}}}").into()
}

/// The balance at `key`. It refuses balances that no sequence of transactions can reach, so that
/// sums of a few balances cannot overflow.
fn balance(key: &Key, reads: &Reads) -> Result<i64, String> {
    let read = reads.get(key).ok_or_else(|| format!("{key} was requested but not read"))?;
    let Some(value) = &read.value else { return Ok(INITIAL_CENTS) };
    std::str::from_utf8(&value.0)
        .ok()
        .and_then(|text| text.parse().ok())
        .filter(|cents: &i64| cents.unsigned_abs() < 1 << 60)
        .ok_or_else(|| format!("{key} holds {value}, which is not a balance"))
}

/// The workload.
#[derive(Debug)]
pub struct SmallBank {
    users: u64,
    hot_users: u64,
    hot_share: f64,
    priorities: Priorities,
}

impl SmallBank {
    /// `keys` users (1 M), of whom `hot_users` (1 000) are hot. A share `hot_share` (0.9) of the
    /// transactions is on hot users, the others on the rest.
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(options: &Options) -> Result<Self, WorkloadError> {
        options.only("smallbank", &["keys", "hot_users", "hot_share"])?;
        let users = bounded("keys", options.keys, 1_000_000, (4, 1 << 40))?;
        let names = Action::ALL.map(Action::name);
        Ok(Self {
            users,
            hot_users: bounded("hot_users", options.hot_users, 1_000, (2, users - 2))?,
            hot_share: share("hot_share", options.hot_share, 0.9)?,
            priorities: options.priorities(&names)?,
        })
    }

    /// Two different users, both hot or both not.
    fn users(&self, rng: &mut Rng) -> (u64, u64) {
        let (low, count) = if chance(self.hot_share, rng) {
            (0, self.hot_users)
        } else {
            (self.hot_users, self.users - self.hot_users)
        };
        let first = rng.below(count);
        let second = (first + 1 + rng.below(count - 1)) % count;
        (low + first, low + second)
    }
}

impl Workload for SmallBank {
    fn name(&self) -> String {
        "smallbank".into()
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn next(&mut self, _issuer: Issuer, rng: &mut Rng) -> Request {
        let Some(&action) = weighted(&Action::MIX, rng) else {
            unreachable!("the weights of the mix add up to 100")
        };
        let (a, b) = self.users(rng);
        let (reads, writes) = action.keys(a, b);
        let kind = if writes.is_empty() { Kind::ReadOnly } else { Kind::Interactive };
        let name = action.name();
        let priority = self.priorities.draw(name, rng);
        Request { name, kind, reads, writes, priority, parameter: action.cents(), scan: None }
    }

    fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        let Some(action) = Action::ALL.into_iter().find(|action| action.name() == request.name)
        else {
            return Decision::Abort;
        };
        // A malformed balance shortens the list; a committed transaction that reads it reports it.
        let before: Vec<i64> =
            request.reads.iter().filter_map(|key| balance(key, reads).ok()).collect();
        if before.len() != request.reads.len() {
            return Decision::Abort;
        }
        let after = action.after(&before, request.parameter.cast_signed()).unwrap_or_default();
        let values = after.into_iter().map(|cents| Some(Value::from(cents.to_string())));
        Decision::Commit(request.writes.iter().cloned().zip(values).collect::<Writes>())
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        for key in &request.reads {
            let cents = balance(key, reads)?;
            if key.bytes().starts_with(b"savings") && !(0..=INITIAL_CENTS).contains(&cents) {
                return Err(format!(
                    "{key} holds {cents} cents; savings lie between 0 and {INITIAL_CENTS}"
                ));
            }
        }
        Ok(())
    }
}
