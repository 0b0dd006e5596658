//! `bank`: money moves between accounts, and the total never changes.
//!
//! The value of an account is the *change* of its balance since it was opened, as a decimal number.
//! So a missing key is an account with its initial balance, and `Op::Add` can move money without a
//! loading phase. A transaction that reads all accounts must find the initial total. No transaction
//! may find a negative balance.
//!
//! With the option `deletes`, some transactions *settle* an account: another account takes what it
//! has above its initial balance, or pays what it lacks. Then its key is deleted.

use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Op, Priority, Read, Reads, Value, Writes};

use super::options::{Priorities, bounded, share};
use super::spread::{Spread, Zipf, chance};
use super::{Form, Issuer, Options, Request, Values, Workload, WorkloadError};

/// The initial balance of every account.
pub const INITIAL_BALANCE: i64 = 1_000;

/// The largest amount that one account receives in one transfer: large enough that some payers have
/// too little.
const AMOUNT_MAX: u64 = 100;

const TRANSFER: &str = "transfer";
const AUDIT: &str = "audit";
const SETTLE: &str = "settle";

/// The workload.
#[derive(Debug)]
pub struct Bank {
    accounts: Vec<Key>,
    per_transfer: usize,
    spread: Spread,
    read_only: f64,
    deletes: f64,
    form: Form,
    priorities: Priorities,
}

impl Bank {
    /// A bank with `keys` accounts (100) and `accounts_per_transfer` accounts in each transfer (2),
    /// chosen by `zipf` (0). A share `read_only` (0.1) of the transactions reads all accounts. Of
    /// the others, a share `deletes` (0) settles an account.
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(options: &Options) -> Result<Self, WorkloadError> {
        let known = ["keys", "zipf", "read_only", "form", "accounts_per_transfer", "deletes"];
        options.only("bank", &known)?;
        let accounts = bounded("keys", options.keys, 100, (2, 10_000))?;
        let per_transfer = bounded(
            "accounts_per_transfer",
            options.accounts_per_transfer,
            2,
            (2, accounts.min(100)),
        )?;
        Ok(Self {
            accounts: (0..accounts).map(|number| format!("account{number}").into()).collect(),
            per_transfer: usize::try_from(per_transfer).unwrap_or(usize::MAX),
            spread: Spread::Zipf {
                ranks: Zipf::new(accounts, options.theta(0.0)?),
                keys_per_rank: 1,
                rank_share: 1.0,
            },
            read_only: share("read_only", options.read_only, 0.1)?,
            deletes: share("deletes", options.deletes, 0.0)?,
            form: options.form.unwrap_or_default(),
            priorities: options.priorities(&[TRANSFER, AUDIT, SETTLE])?,
        })
    }

    fn audit_request(&self, priority: Priority) -> Request {
        Request {
            name: AUDIT,
            kind: Kind::ReadOnly,
            reads: self.accounts.clone(),
            writes: Vec::new(),
            priority,
            parameter: 0,
            scan: None,
        }
    }
}

/// The balance of an account, computed from the value read.
fn balance(key: &Key, reads: &Reads) -> Result<i64, String> {
    let read = reads.get(key).ok_or_else(|| format!("{key} was requested but not read"))?;
    change(read)
        .and_then(|change| change.checked_add(INITIAL_BALANCE))
        .ok_or_else(|| format!("{key} holds {:?}, which is not a balance", read.value))
}

fn change(read: &Read) -> Option<i64> {
    read.value.as_ref().map_or(Some(0), |value| std::str::from_utf8(&value.0).ok()?.parse().ok())
}

/// Operations by which the first key pays `amount` to each of the others. They abort if it has too
/// little money.
fn transfer_ops(keys: &[Key], amount: i64) -> Vec<Op> {
    let Some((payer, payees)) = keys.split_first() else { return Vec::new() };
    let debit = payees.iter().fold(0_i64, |sum, _| sum.saturating_add(amount));
    // There is no guard for "at least", but addition aborts on overflow. The value is first moved
    // down so far that the balance 0 is the smallest representable number. A negative balance then
    // overflows. Moving the value up again restores it.
    let down = i64::MIN + INITIAL_BALANCE;
    let up = i64::MAX - INITIAL_BALANCE + 1;
    let mut ops = [-debit, down, up]
        .map(|amount| Op::Add(payer.clone(), amount))
        .into_iter()
        .collect::<Vec<_>>();
    ops.extend(payees.iter().map(|payee| Op::Add(payee.clone(), amount)));
    ops
}

/// The first account has its initial balance again, and loses its key; the second has the rest.
fn settle(accounts: &[Key], reads: &Reads) -> Decision {
    let [settled, other] = accounts else { return Decision::Commit(Writes::new()) };
    let total = balance(settled, reads)
        .and_then(|balance_of| Ok(balance_of.saturating_add(balance(other, reads)?)));
    match total.map(|total| total - INITIAL_BALANCE) {
        Ok(after) if after >= 0 => {
            let change = (after - INITIAL_BALANCE).to_string();
            let writes = [(settled.clone(), None), (other.clone(), Some(Value::from(change)))];
            Decision::Commit(Writes::from(writes))
        }
        Ok(_) | Err(_) => Decision::Abort,
    }
}

impl Workload for Bank {
    fn name(&self) -> String {
        "bank".into()
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        if chance(self.read_only, rng) {
            let priority = self.priorities.draw(AUDIT, rng);
            return self.audit_request(priority);
        }
        // Without deletions nothing more is drawn, so that the draws of other configurations stay
        // the same.
        let settles = self.deletes > 0.0 && chance(self.deletes, rng);
        let picked = self.spread.pick(if settles { 2 } else { self.per_transfer }, issuer, rng);
        let keys: Vec<Key> = picked
            .into_iter()
            .filter_map(|number| self.accounts.get(usize::try_from(number).ok()?).cloned())
            .collect();
        if settles {
            let (name, kind) = (SETTLE, Kind::Interactive);
            let priority = self.priorities.draw(SETTLE, rng);
            let (reads, writes) = (keys.clone(), keys);
            return Request { name, kind, reads, writes, priority, parameter: 0, scan: None };
        }
        let amount = rng.range(1, AMOUNT_MAX);
        let kind = if self.form.draw_procedure(rng) {
            Kind::Procedure(transfer_ops(&keys, amount.cast_signed()))
        } else {
            Kind::Interactive
        };
        let priority = self.priorities.draw(TRANSFER, rng);
        Request {
            name: TRANSFER,
            kind,
            reads: keys.clone(),
            writes: keys,
            priority,
            parameter: amount,
            scan: None,
        }
    }

    fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        if request.name == SETTLE {
            return settle(&request.writes, reads);
        }
        // The payer is the first of the write keys.
        let amount = request.parameter.cast_signed();
        let Some((payer, payees)) = request.writes.split_first() else {
            return Decision::Commit(Writes::new());
        };
        let debit = payees.iter().fold(0_i64, |sum, _| sum.saturating_add(amount));
        let mut writes = Writes::new();
        for (key, amount) in
            std::iter::once((payer, -debit)).chain(payees.iter().map(|payee| (payee, amount)))
        {
            // Nothing can be added to a malformed value; the next audit reports it.
            let Ok(after) = balance(key, reads).map(|before| before.saturating_add(amount)) else {
                return Decision::Abort;
            };
            if after < 0 {
                return Decision::Abort;
            }
            let change = after - INITIAL_BALANCE;
            writes.insert(key.clone(), Some(Value::from(change.to_string())));
        }
        Decision::Commit(writes)
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        let mut total = 0_i64;
        for key in &request.reads {
            let balance = balance(key, reads)?;
            if balance < 0 {
                return Err(format!("{key} holds {balance}; a balance must not be negative"));
            }
            total = total.saturating_add(balance);
        }
        let accounts = i64::try_from(self.accounts.len()).unwrap_or(i64::MAX);
        let expected = accounts.saturating_mul(INITIAL_BALANCE);
        if request.name == AUDIT && total != expected {
            return Err(format!(
                "the sum over all {accounts} accounts is {total}; it must be {expected}"
            ));
        }
        Ok(())
    }

    fn final_requests(&self) -> Vec<Request> {
        vec![self.audit_request(Priority::LOW)]
    }
}
