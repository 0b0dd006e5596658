//! Scans and watches of clients: they drive the machines of [`orthodrome_core::scan`] and
//! [`orthodrome_core::watch`] as a gateway does.

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::scan::{Answer, Ask, KeyRange, Page, ScanError, Scanner, Step, is_fence};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Reads};
use orthodrome_eval::workload::Ranging;

use super::active::Action;
use super::ranging::{found, judge_page};
use super::watching::Watching;
use super::{BACK_OFF, Load};

/// How long a scan waits before it reads again after an aborted read, at first.
const PAUSE: Duration = Duration::from_millis(5);

/// The longest such wait.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A scan at a gateway: the client, and a number that no other scan of the run has. A scan that
/// begins again has a new number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanId {
    /// The client.
    pub client: u32,
    /// The number.
    pub number: u64,
}

/// A request for names that the gateway of a scan sends to a server.
#[derive(Debug)]
pub struct Asked {
    /// The scan.
    pub scan: ScanId,
    /// The gateway.
    pub gateway: u32,
    /// The server.
    pub to: NodeId,
    /// The request.
    pub ask: Ask,
    /// WAN hops before it.
    pub hops: u16,
}

/// What a client drives.
#[derive(Debug)]
pub(super) enum Driven {
    Scan(Box<Scanner>),
    Watch(Box<Watching>),
}

/// A pending scan or watch of a client.
#[derive(Debug)]
pub(super) struct Scanning {
    number: u64,
    /// None: the scan begins when its client wakes up.
    pub(super) driven: Option<Driven>,
    /// When its client wakes up to ask servers again.
    due: Option<Time>,
    /// True while a transaction reads.
    is_reading: bool,
    /// When the last read committed, and its timestamp, until it is known whether the scan accepts it.
    read: Option<(Time, Timestamp)>,
    /// How long to wait before the next read.
    wait: Duration,
    /// How long to wait after the next aborted read.
    pause: Duration,
    hops: u16,
}

impl Scanning {
    /// The part of its range that a scan reads.
    pub(super) fn part(&self) -> Option<KeyRange> {
        match &self.driven {
            Some(Driven::Scan(scanner)) => Some(scanner.part()),
            Some(Driven::Watch(_)) | None => None,
        }
    }

    /// A scan that begins when its client wakes up.
    pub(super) fn new() -> Self {
        Self {
            number: 0,
            driven: None,
            due: None,
            is_reading: false,
            read: None,
            wait: Duration::ZERO,
            pause: PAUSE,
            hops: 0,
        }
    }

    /// True while a transaction reads, or is about to.
    pub(super) fn is_reading(&self) -> bool {
        self.is_reading
    }

    /// WAN hops so far.
    pub(super) fn hops(&self) -> u16 {
        self.hops
    }

    /// Ends this scan at this gateway. It may begin again.
    pub(super) fn reset(&mut self) {
        (self.driven, self.due, self.is_reading) = (None, None, false);
        self.wait = Duration::ZERO;
    }
}

impl Load {
    pub(super) fn scanning(&mut self, slot: u32) -> Option<&mut Scanning> {
        self.client(slot).active.as_mut()?.scan.as_deref_mut()
    }

    /// Wakes the client of a scan that is not reading: it begins the scan, or asks servers again.
    pub(super) fn wake_scan(&mut self, slot: u32, now: Time, is_up: impl Fn(u32) -> bool) {
        let Some(scanning) = self.scanning(slot) else { return };
        match &mut scanning.driven {
            Some(Driven::Scan(scanner)) => {
                let steps = scanner.on_time(now);
                return self.take_steps(slot, steps, now);
            }
            Some(Driven::Watch(watching)) => {
                let steps = watching.watcher.on_time(now);
                return self.take_watch_steps(slot, steps, now);
            }
            None => {}
        }
        match self.nearest_gateway(slot, is_up) {
            Some(gateway) => self.begin_scan(slot, gateway, now),
            // Every gateway is down; retry later.
            None => self.schedule(slot, now + BACK_OFF * 5, Action::Begin),
        }
    }

    fn begin_scan(&mut self, slot: u32, gateway: u32, now: Time) {
        self.scans += 1;
        let (number, shares) = (self.scans, self.abilities.shares);
        let home = self.gateways.iter().find(|(dense, ..)| *dense == gateway);
        let home = home.map(|&(.., region)| region);
        let no_second_list = self.model.no_second_list;
        let cluster = self.floor.cluster();
        let Some(active) = self.clients.get_mut(slot as usize).and_then(|c| c.active.as_mut())
        else {
            return;
        };
        let (Some(scan), Some(home)) = (active.request.scan.clone(), home) else { return };
        active.gateway = gateway;
        active.attempt_began = now;
        let scan = match scan {
            Ranging::Scan(scan) => scan,
            Ranging::Watch(range, batches) => {
                if let Some(scanning) = &mut active.scan {
                    scanning.number = number;
                }
                return self.begin_watch(slot, (range, batches), home, now);
            }
        };
        match Scanner::new(cluster, shares, home, scan, now) {
            Ok((mut scanner, steps)) => {
                if no_second_list {
                    scanner.without_second_list();
                }
                if let Some(scanning) = &mut active.scan {
                    (scanning.number, scanning.driven) =
                        (number, Some(Driven::Scan(Box::new(scanner))));
                }
                self.take_steps(slot, steps, now);
            }
            Err(error) => self.on_scan_failed(slot, error, now),
        }
    }

    /// A server answered a request for names.
    pub fn on_names(
        &mut self,
        now: Time,
        (scan, gateway): (ScanId, u32),
        (from, answer): (NodeId, Answer),
        hops: u16,
    ) {
        let client = self.clients.get_mut(scan.client as usize);
        let Some(active) = client.and_then(|client| client.active.as_mut()) else { return };
        let is_here = active.gateway == gateway;
        let Some(scanning) = active.scan.as_deref_mut() else { return };
        if !is_here || scanning.number != scan.number {
            return;
        }
        scanning.hops = scanning.hops.max(hops);
        match &mut scanning.driven {
            None => {}
            Some(Driven::Scan(scanner)) => {
                let steps = scanner.on_answer(from, answer, now);
                self.take_steps(scan.client, steps, now);
            }
            Some(Driven::Watch(watching)) => {
                let steps = watching.watcher.on_answer(from, answer, now);
                self.take_watch_steps(scan.client, steps, now);
            }
        }
    }

    /// Sends a request of the client's scan.
    pub(super) fn ask(&mut self, slot: u32, to: NodeId, ask: Ask) {
        let Some(active) = self.client(slot).active.as_deref() else { return };
        let Some(scanning) = &active.scan else { return };
        let scan = ScanId { client: slot, number: scanning.number };
        let (gateway, hops) = (active.gateway, scanning.hops);
        self.asks.push(Asked { scan, gateway, to, ask, hops });
    }

    fn take_steps(&mut self, slot: u32, steps: Vec<Step>, now: Time) {
        for step in steps {
            match step {
                Step::Ask(to, ask) => self.ask(slot, to, ask),
                Step::Read(keys) => {
                    self.record_read(slot, None);
                    self.begin_read(slot, keys, now);
                }
                Step::Done(Ok(page)) => {
                    self.record_read(slot, Some(&page));
                    let hops = self.scanning(slot).map_or(0, |scanning| scanning.hops);
                    self.count_commit(slot, now, hops);
                    self.end(slot, now, false);
                    return;
                }
                Step::Done(Err(error)) => {
                    self.on_scan_failed(slot, error, now);
                    return;
                }
            }
        }
        self.await_deadline(slot);
    }

    /// Wakes the client at the deadline of its scan.
    pub(super) fn await_deadline(&mut self, slot: u32) {
        let Some(scanning) = self.scanning(slot) else { return };
        let deadline = match &scanning.driven {
            None => None,
            Some(Driven::Scan(scanner)) => scanner.deadline(),
            Some(Driven::Watch(watching)) => watching.watcher.deadline(),
        };
        if scanning.due != deadline {
            scanning.due = deadline;
            if let Some(at) = deadline {
                self.schedule(slot, at, Action::Ask);
            }
        }
    }

    /// Each read of a scan is a transaction with a name of its own.
    pub(super) fn begin_read(&mut self, slot: u32, keys: Vec<Key>, now: Time) {
        self.rename(slot);
        let Some(active) = self.client(slot).active.as_deref_mut() else { return };
        active.request.reads = keys;
        let Some(scanning) = active.scan.as_deref_mut() else { return };
        scanning.is_reading = true;
        let at = now + std::mem::take(&mut scanning.wait);
        self.schedule(slot, at, Action::Begin);
    }

    /// The read of a scan has ended.
    pub(super) fn on_scan_outcome(&mut self, slot: u32, now: Time, outcome: Outcome, hops: u16) {
        let Some(active) = self.client(slot).active.as_deref_mut() else { return };
        let (txn, has_reads) = (active.txn, active.reads.is_some());
        let reads = active.reads.clone().unwrap_or_default();
        let Some(scanning) = active.scan.as_deref_mut() else { return };
        if !std::mem::take(&mut scanning.is_reading) {
            return;
        }
        match outcome {
            Outcome::Committed(at) => {
                scanning.hops = scanning.hops.max(hops);
                let scanner = match &mut scanning.driven {
                    Some(Driven::Watch(watching)) => {
                        let steps = watching.watcher.on_read(at, now);
                        return self.take_watch_steps(slot, steps, now);
                    }
                    Some(Driven::Scan(scanner)) => Some(scanner),
                    None => None,
                };
                let steps = scanner.map_or_else(Vec::new, |s| s.on_read(reads, at, now));
                scanning.read = Some((now, at));
                if !has_reads {
                    let problem = format!("{txn} committed, but its client received no reads");
                    self.note_failure(Err(problem));
                }
                self.remember(slot, at);
                self.take_steps(slot, steps, now);
            }
            Outcome::Aborted(reason) => {
                self.write_history(slot, Some((now, outcome)), true);
                let is_final = self.client(slot).active.as_ref().is_some_and(|a| a.is_final);
                if self.measured.contains(&now) && !is_final {
                    *self.counters.aborted.entry(reason).or_default() += 1;
                }
                self.read_again(slot, reason, now);
            }
            Outcome::Unknown => {
                // It had no effect. But the client cannot say that it knows all its outcomes.
                self.change_id(slot);
                self.read_again(slot, AbortReason::Recovery, now);
            }
        }
    }

    fn read_again(&mut self, slot: u32, reason: AbortReason, now: Time) {
        let Some(scanning) = self.scanning(slot) else { return };
        scanning.wait = scanning.pause;
        scanning.pause = (scanning.pause * 2).min(PAUSE_MAX);
        match &mut scanning.driven {
            None => {}
            Some(Driven::Scan(scanner)) => {
                let steps = scanner.on_aborted(reason);
                self.take_steps(slot, steps, now);
            }
            Some(Driven::Watch(watching)) => {
                let steps = watching.watcher.on_aborted(reason, now);
                self.take_watch_steps(slot, steps, now);
            }
        }
    }

    /// The scan has no result. It begins again.
    fn on_scan_failed(&mut self, slot: u32, error: ScanError, now: Time) {
        let Some(active) = self.client(slot).active.as_deref_mut() else { return };
        let txn = active.txn;
        let Some(scanning) = active.scan.as_deref_mut() else { return };
        scanning.reset();
        match error {
            ScanError::NoFence | ScanError::Refused(AbortReason::Invalid) => {
                self.note_failure(Err(format!("the scan of {txn}: {error}")));
            }
            ScanError::Busy | ScanError::Refused(_) => {}
        }
        self.record_read(slot, None);
        self.schedule(slot, now + BACK_OFF * 5, Action::Begin);
    }

    /// The gateway died. The client begins the scan again at another one.
    pub(super) fn move_scan(&mut self, slot: u32, now: Time) {
        self.record_read(slot, None);
        let Some(scanning) = self.scanning(slot) else { return };
        scanning.reset();
        self.change_id(slot);
        self.schedule(slot, now + BACK_OFF, Action::Begin);
    }

    /// The client continues under another id.
    fn change_id(&mut self, slot: u32) {
        let id = self.incarnate(slot);
        let client = self.client(slot);
        (client.id, client.counter) = (id, 1);
        if let Some(active) = &mut client.active {
            active.start_over(TxnId::new(id, 1));
        }
    }

    /// Records the last read of a scan, if it committed and is not recorded yet. With the page that
    /// the scan returned, it read the keys of the page, and found that no other key of the page's
    /// range exists.
    pub(super) fn record_read(&mut self, slot: u32, page: Option<&Page>) {
        let Self { clients, written, .. } = self;
        let Some(active) = clients.get_mut(slot as usize).and_then(|c| c.active.as_deref_mut())
        else {
            return;
        };
        let read = active.scan.as_deref_mut().and_then(|scanning| scanning.read.take());
        let Some((completed, at)) = read else { return };
        let mut reads = without_fences(active.reads.take().unwrap_or_default());
        let mut verdict = Ok(());
        if let (Some(page), Some(Ranging::Scan(scan))) = (page, &active.request.scan) {
            verdict = judge_page(scan, page);
            reads = found(scan, page, &reads, written);
        }
        active.request.reads = reads.keys().cloned().collect();
        active.reads = Some(reads);
        self.note_failure(verdict);
        self.check_commit(slot, at);
        self.write_history(slot, Some((completed, Outcome::Committed(at))), false);
    }
}

/// The reads without those of fences.
pub(super) fn without_fences(mut reads: Reads) -> Reads {
    reads.retain(|key, _| !is_fence(key));
    reads
}
