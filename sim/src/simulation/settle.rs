//! The end of a run: transactions end, the final audit reads everything, and replicas agree.

use orthodrome_core::machine::{Machine, Protocol};
use orthodrome_core::time::{Duration, Timestamp};

use super::node::on_host;
use super::{Failure, FailureKind, Process, Simulation};
use crate::oracle::Oracle;
use crate::watch::{self, Copies, Unrest};

impl<P: Protocol> Simulation<P> {
    /// Submits no new transactions. Pending ones have `limit` to end.
    ///
    /// # Errors
    /// The first broken promise; or a transaction that did not end, if outcomes are checked.
    pub fn drain(&mut self, limit: Duration) -> Result<(), Failure> {
        self.env.load.stop();
        self.wait_for_outstanding(0, limit)?;
        self.judge_ended(limit)
    }

    /// Submits no new transactions. Pending ones continue as long as one of them ends within every
    /// `limit`. A protocol whose transactions queue for locks may be slow without being stuck.
    ///
    /// # Errors
    /// The first broken promise; or a transaction that did not end, if outcomes are checked.
    pub fn drain_while_moving(&mut self, limit: Duration) -> Result<(), Failure> {
        self.env.load.stop();
        let mut before = self.env.load.outstanding();
        while let Some(fewer) = before.checked_sub(1) {
            self.wait_for_outstanding(fewer, limit)?;
            if self.env.load.outstanding() == before {
                break;
            }
            before = self.env.load.outstanding();
        }
        self.judge_ended(limit)
    }

    fn judge_ended(&mut self, limit: Duration) -> Result<(), Failure> {
        if self.env.load.outstanding() > 0 && self.options.check_outcomes && !self.is_beyond() {
            let stuck: Vec<String> =
                self.env.load.under_way().take(5).map(|(txn, _)| txn.to_string()).collect();
            let count = self.env.load.outstanding();
            self.env.fail(
                FailureKind::Stuck,
                format!(
                    "{count} transactions are still pending after {limit:?}: {}",
                    stuck.join(", ")
                ),
            );
        }
        self.env.failure.take().map_or(Ok(()), Err)
    }

    /// Runs until at most `most` transactions are pending, or `limit` has passed.
    fn wait_for_outstanding(&mut self, most: u32, limit: Duration) -> Result<(), Failure> {
        let deadline = self.env.now + limit;
        let is_due = |run: &Self| run.env.load.outstanding() > most && run.env.now < deadline;
        while is_due(self) && !self.is_beyond() {
            let step = self.env.now + Duration::from_millis(50);
            self.run_until(step.min(deadline))?;
        }
        Ok(())
    }

    /// A clock that broke its bound may have given an acknowledged write a timestamp that is still to
    /// come on another clock, and who reads before it by that clock need not see the write: the history
    /// is serializable, and that is all that was promised. So the final audit waits until all clocks
    /// have passed it, at most as long as for transactions.
    fn wait_for_timestamps(&mut self) -> Result<(), Failure> {
        if !(P::NEEDS_CLOCKS && self.plan.breaks_clocks()) {
            return Ok(());
        }
        let latest = self.env.load.oracle.as_ref().map_or(Timestamp::ZERO, Oracle::latest);
        let latest = latest + self.options.clock.error * 2;
        let deadline = self.env.now + self.options.drain;
        let is_late = |run: &Self| {
            let mut clocks = run.nodes.iter().map(|node| node.clock.read(run.env.now).now);
            clocks.any(|now| now < latest)
        };
        while is_late(self) && self.env.now < deadline && !self.is_beyond() {
            let step = self.env.now + Duration::from_millis(50);
            self.run_until(step.min(deadline))?;
        }
        Ok(())
    }

    /// Reads the whole database at the end: for the workload's audit, and, if outcomes are checked,
    /// every key that a committed transaction accessed, to compare it with what was acknowledged.
    ///
    /// # Errors
    /// If an acknowledged write is missing, or an invariant does not hold.
    pub fn audit(&mut self) -> Result<(), Failure> {
        self.wait_for_timestamps()?;
        let mut requests = self.env.load.final_requests();
        requests.extend(self.env.load.final_reads());
        for request in requests {
            let now = self.env.now;
            self.env.load.issue_final(request, now);
            self.env.take_due();
            self.wait_for_outstanding(0, self.options.drain)?;
            if self.is_beyond() {
                return Ok(());
            }
            if self.env.load.outstanding() > 0 {
                let detail = "a read-only transaction of the final audit is still pending".into();
                self.env.fail(FailureKind::Stuck, detail);
            }
            if let Some(failure) = self.env.failure.take() {
                return Err(failure);
            }
        }
        if let Err(detail) = self.env.load.audit_end() {
            self.env.fail(FailureKind::Promise, detail);
        }
        self.env.failure.take().map_or(Ok(()), Err)
    }

    /// Runs until no running machine has leaks and all replica digests agree, for at most `limit`.
    ///
    /// # Errors
    /// The remaining leaks, or the difference.
    pub fn settle(&mut self, limit: Duration) -> Result<(), Failure> {
        self.settle_within(limit, false)
    }

    /// The same, but continues as long as the leaks shrink within every `limit`. Links that lose
    /// packets are slow, and a server that was down may have much to receive.
    ///
    /// # Errors
    /// The remaining leaks, or the difference.
    pub fn settle_while_moving(&mut self, limit: Duration) -> Result<(), Failure> {
        self.settle_within(limit, true)
    }

    fn settle_within(&mut self, limit: Duration, is_extended: bool) -> Result<(), Failure> {
        let mut deadline = self.env.now + limit;
        let mut least = usize::MAX;
        let mut copies = Copies::default();
        // The intervals are irregular, so that they never coincide with a group that appends at
        // regular intervals. Some are short, because a follower is where its leader was a round
        // trip earlier.
        let mut look = 0_u64;
        loop {
            if self.is_beyond() {
                return Ok(());
            }
            let (kind, detail) = match self.rest(&mut copies) {
                Ok(()) => return Ok(()),
                Err(Unrest::Differs(detail)) => (FailureKind::Claim, detail),
                Err(Unrest::Left(detail)) => (FailureKind::Stuck, detail),
            };
            if is_extended && self.left_over() < least {
                least = self.left_over();
                deadline = self.env.now + limit;
            }
            if kind == FailureKind::Claim || self.env.now >= deadline {
                return Err(Failure { at: self.env.now, kind, detail });
            }
            self.run_until(self.env.now + Duration::from_millis(1 + look * 37 % 101))?;
            look += 1;
        }
    }

    /// The total of leaks on all running machines.
    fn left_over(&self) -> usize {
        let mut all = 0;
        for node in &self.nodes {
            let held = on_host!(&node.process, host => host.machine().leaks(), continue);
            all += held.into_iter().map(|(_, count)| count).sum::<usize>();
        }
        all
    }

    fn rest(&self, seen: &mut Copies) -> Result<(), Unrest> {
        for node in &self.nodes {
            on_host!(&node.process, host => watch::leaks(node.id, host.machine())?, continue);
        }
        let mut copies = Vec::new();
        for node in &self.nodes {
            let held = on_host!(&node.process, host => host.machine().replica_digests(), continue);
            copies.extend(held.into_iter().map(|copy| (node.id, copy)));
        }
        seen.compare(&copies)
    }
}
