//! Leases over a model of a database: owners and those who end leases take turns at random, stop
//! anywhere, and run serializable transactions that may abort.

use super::*;
use crate::ClientId;
use crate::id::TxnId;
use crate::ordered::OrdMap;
use crate::rng::Rng;
use crate::txn::{Txn, Version};

/// What is left out, to show that the test notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unsafe {
    Nothing,
    /// Whoever ends a lease does not look again for keys that were attached meanwhile.
    LooksOnce,
    /// Keys are deleted although somebody has written them since.
    ForgetsVersions,
    /// A due entry counts although the lease was renewed.
    IgnoresRenewals,
    /// Keys are attached without a look at the record.
    AttachesBlindly,
    /// A renewal that is late counts although a later one has extended the lease.
    Shortens,
}

/// The time of the leases, in seconds.
const TTL: u64 = 10;

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * 1_000_000_000)
}

/// Somebody who ends a lease, between two steps.
#[derive(Debug)]
enum Sweep {
    Idle,
    Scanning(Ending),
    /// With the page.
    Reading(Ending, Page),
    /// With what the transaction has read.
    Deciding(Ending, Page, Reads),
}

struct World {
    rng: Rng,
    variant: Unsafe,
    /// In seconds.
    now: u64,
    commits: u64,
    data: OrdMap<Key, Read>,
    leases: Vec<LeaseId>,
    /// Until when leases live that nobody has revoked, as their owners know.
    promised: OrdMap<LeaseId, u64>,
    /// The lease under which each key was last written, if any.
    owners: OrdMap<Key, Option<LeaseId>>,
}

impl World {
    fn new(seed: u64, variant: Unsafe) -> Self {
        let (data, owners) = (OrdMap::new(), OrdMap::new());
        let rng = Rng::stream(seed, "lease", 0);
        let (leases, promised) = (Vec::new(), OrdMap::new());
        Self { rng, variant, now: 1, commits: 0, data, leases, promised, owners }
    }

    fn read(&self, keys: &[Key]) -> Reads {
        keys.iter()
            .map(|key| (key.clone(), self.data.get(key).cloned().unwrap_or_default()))
            .collect()
    }

    fn write(&mut self, writes: Writes) {
        self.commits += 1;
        let writer = TxnId::new(ClientId(1), self.commits);
        let version = Version { timestamp: Timestamp(self.commits), writer };
        for (key, value) in writes {
            match value {
                Some(_) => drop(self.data.insert(key, Read { value, version })),
                None => drop(self.data.remove(&key)),
            }
        }
    }

    /// Runs a procedure. True if it committed.
    fn run(&mut self, ops: &[Op]) -> bool {
        let keys: Vec<Key> = ops.iter().flat_map(Op::reads).cloned().collect();
        let writes = Txn::execute(ops, &self.read(&keys));
        writes.map(|writes| self.write(writes)).is_ok()
    }

    fn has(&self, key: &Key) -> bool {
        self.data.contains_key(key)
    }

    fn until(&self, id: LeaseId) -> Option<Timestamp> {
        ends_at(self.data.get(&id.until()))
    }

    /// Renews a lease, perhaps late: the call began at `then`.
    fn renew(&mut self, id: LeaseId, then: u64) {
        let then_at = at(then);
        let keys = id.renewal_keys(then_at);
        let mut reads = self.read(&keys.reads);
        if self.variant == Unsafe::Shortens {
            reads.remove(&id.until());
        }
        let writes = id.renew(then_at, &reads);
        assert_eq!(writes.is_some(), self.has(&id.record()));
        if let Some(writes) = writes {
            assert!(writes.keys().all(|key| keys.writes.contains(key)));
            self.write(writes);
            let promised = self.promised.entry(id).or_default();
            *promised = (then + TTL).max(*promised);
        }
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.rng.below(end as u64)).unwrap()
    }

    fn any_lease(&mut self) -> Option<LeaseId> {
        let at = self.below(self.leases.len().max(1));
        self.leases.get(at).copied()
    }

    /// An owner does something.
    fn act(&mut self) {
        let key = Key::from(format!("k{}", self.below(6)));
        match self.below(10) {
            0 => {
                let ttl = Duration::from_secs(TTL);
                let id = LeaseId::new(ttl, self.leases.len() as u64).unwrap();
                assert!(self.run(&id.grant(at(self.now))));
                self.promised.insert(id, self.now + TTL);
                self.leases.push(id);
            }
            1..5 => {
                let Some(id) = self.any_lease() else { return };
                let lives = self.has(&id.record());
                let mut ops = id.put(key.clone(), Value::from("attached"));
                if self.variant == Unsafe::AttachesBlindly {
                    ops.remove(0);
                }
                let committed = self.run(&ops);
                assert!(committed == lives || self.variant == Unsafe::AttachesBlindly);
                if committed {
                    self.owners.insert(key, Some(id));
                }
            }
            5..7 => {
                assert!(self.run(&[Op::Put(key.clone(), Value::from("free"))]));
                self.owners.insert(key, None);
            }
            7..9 => {
                let Some(id) = self.any_lease() else { return };
                let late = self.rng.below(9);
                self.renew(id, self.now.saturating_sub(late));
            }
            _ => {
                let Some(id) = self.any_lease() else { return };
                assert!(self.run(&id.revoke(at(self.now))));
                self.promised.remove(&id);
            }
        }
    }

    /// Whoever ends leases makes one step.
    fn sweep(&mut self, sweep: Sweep) -> Sweep {
        match sweep {
            Sweep::Idle => {
                let range = all_due();
                let mut due: Vec<_> = self.data.keys().filter(|key| range.contains(key)).collect();
                due.truncate(ENTRIES_AT_ONCE);
                let due: Vec<_> = due.into_iter().filter_map(parse_due).collect();
                let due: Vec<_> =
                    due.into_iter().filter(|(time, _)| *time < at(self.now)).collect();
                if self.variant == Unsafe::IgnoresRenewals {
                    let first = due.first().copied();
                    return first
                        .map_or(Sweep::Idle, |(t, id)| Sweep::Scanning(Ending::new(t, id)));
                }
                let (writes, ending) = renewed(&due, &self.read(&renewed_keys(&due).reads));
                self.write(writes);
                let at = self.below(ending.len().max(1));
                let one = ending.get(at).copied();
                one.map_or(Sweep::Idle, |(time, id)| Sweep::Scanning(Ending::new(time, id)))
            }
            Sweep::Scanning(mut ending) => {
                if self.below(4) == 0 {
                    let _ = ending.shorten();
                }
                let Scan { range, limit, .. } = ending.scan();
                let found = self.data.iter().filter(|(key, _)| range.contains(key));
                let found: Vec<_> = found.map(|(k, r)| (k.clone(), r.clone())).collect();
                // A page may be empty where servers remember deletions, and yet not be the last one.
                let (limit, dots) = if self.below(3) == 0 {
                    (
                        0,
                        Some(KeyRange {
                            from: ending.id.attachment(&"k3".into()),
                            ..range.clone()
                        }),
                    )
                } else {
                    (limit, None)
                };
                let first_left = found.get(limit).map(|(key, _)| key.clone());
                let rest = match (dots, first_left) {
                    (Some(dots), None) if range.from < dots.from => Some(dots),
                    (_, Some(key)) => Some(range.from_on(&key, false)),
                    (_, None) => None,
                };
                let rows = found.into_iter().take(limit).collect();
                Sweep::Reading(ending, Page { rows, rest, ..Page::default() })
            }
            Sweep::Reading(ending, page) => {
                let reads = self.read(&ending.keys(&page).reads);
                Sweep::Deciding(ending, page, reads)
            }
            Sweep::Deciding(ending, page, reads) => self.decide(ending, &page, &reads),
        }
    }

    fn decide(&mut self, mut ending: Ending, page: &Page, reads: &Reads) -> Sweep {
        let keys = ending.keys(page);
        if self.read(&keys.reads) != *reads {
            // It aborts, because what it has read has changed.
            ending.on_aborted();
            return Sweep::Scanning(ending);
        }
        let (mut writes, mut progress) = ending.decide(page, reads);
        assert!(writes.keys().all(|key| keys.writes.contains(key)));
        let id = ending.id;
        match self.variant {
            Unsafe::IgnoresRenewals if progress == Progress::Renewed => {
                let ours = [id.record(), id.until(), id.due(ending.due)];
                let attached = keys.writes.iter().filter_map(|key| id.attached(key));
                writes = ours.into_iter().chain(attached).map(|key| (key, None)).collect();
            }
            Unsafe::ForgetsVersions => {
                writes.extend(keys.writes.iter().filter_map(|key| Some((id.attached(key)?, None))));
            }
            Unsafe::LooksOnce if progress == Progress::Again && page.rest.is_none() => {
                writes.insert(id.due(ending.due), None);
                progress = Progress::Over;
            }
            Unsafe::Nothing
            | Unsafe::LooksOnce
            | Unsafe::IgnoresRenewals
            | Unsafe::AttachesBlindly
            | Unsafe::Shortens => {}
        }
        self.write(writes.clone());
        ending.on_committed(page, &writes);
        match progress {
            Progress::Again => Sweep::Scanning(ending),
            Progress::Over | Progress::Renewed => Sweep::Idle,
        }
    }

    /// What must hold at any time.
    fn check(&self) -> Result<(), String> {
        for (key, owner) in &self.owners {
            let must_be_there = match owner {
                None => true,
                Some(id) => self.promised.get(id).is_some_and(|until| *until >= self.now),
            };
            if must_be_there && !self.has(key) {
                return Err(format!("{key} is gone, which was last written with {owner:?}"));
            }
        }
        Ok(())
    }
}

/// One run: owners and two who end leases take turns; then all leases end.
fn run(seed: u64, variant: Unsafe) -> Result<(), String> {
    let mut world = World::new(seed, variant);
    let mut sweeps = [Sweep::Idle, Sweep::Idle];
    for _ in 0..300 {
        match world.below(6) {
            0 => world.now += 1 + world.rng.below(4),
            1..3 => world.act(),
            _ => {
                let at = world.below(2);
                let sweep = std::mem::replace(&mut sweeps[at], Sweep::Idle);
                // Now and then a gateway dies.
                if world.below(40) != 0 {
                    sweeps[at] = world.sweep(sweep);
                }
            }
        }
        world.check()?;
    }
    world.now += 1_000;
    let [mut sweep, _] = sweeps;
    for _ in 0..5_000 {
        sweep = world.sweep(sweep);
        world.check()?;
    }
    for (key, owner) in &world.owners {
        if owner.is_some() && world.has(key) {
            return Err(format!("{key} outlived its lease, {owner:?}"));
        }
    }
    match world.data.keys().find(|key| key.bytes().starts_with(b"orthodrome/")) {
        Some(left) => Err(format!("{left} is left")),
        None => Ok(()),
    }
}

#[test]
fn keys_go_with_their_lease_and_no_others_go() {
    for seed in 0..500 {
        assert_eq!(run(seed, Unsafe::Nothing), Ok(()), "seed {seed}");
    }
}

#[test]
fn a_lease_that_is_renewed_often_has_few_due_entries() {
    let mut world = World::new(0, Unsafe::Nothing);
    let id = LeaseId::new(Duration::from_secs(TTL), 0).unwrap();
    assert!(world.run(&id.grant(at(1))));
    for _ in 0..100 {
        world.renew(id, 1);
    }
    let entries = |world: &World| world.data.keys().filter(|key| all_due().contains(key)).count();
    assert_eq!(entries(&world), 1);
    // Twelve seconds: a lease of ten seconds ends after eleven and a quarter.
    for now in 1..=12 {
        world.renew(id, now);
    }
    assert!(entries(&world) <= 10, "{}", entries(&world));
    assert!(world.until(id).is_some_and(|until| until >= at(22)));
}

#[test]
fn every_unsafe_variant_of_leases_is_caught() {
    for variant in [
        Unsafe::LooksOnce,
        Unsafe::ForgetsVersions,
        Unsafe::IgnoresRenewals,
        Unsafe::AttachesBlindly,
        Unsafe::Shortens,
    ] {
        let caught = (0..2_000).find(|&seed| run(seed, variant).is_err());
        assert!(caught.is_some(), "{variant:?} was not caught");
    }
}

#[test]
fn every_id_has_one_text() {
    let id = LeaseId::new(Duration::from_secs(30), 0x9f86_d081_884c_7d65).unwrap();
    assert_eq!(id.to_string(), "30000-9f86d081884c7d65");
    assert_eq!("30000-9f86d081884c7d65".parse(), Ok(id));
    assert_eq!(id.record(), "orthodrome/lease/{30000-9f86d081884c7d65}".into());
    for text in [
        "",
        "30000",
        "30000-",
        "030000-9f86d081884c7d65",
        "30000-9F86D081884C7D65",
        "30000-f86d081884c7d65",
        "+30000-9f86d081884c7d65",
        "999-9f86d081884c7d65",
        "99999999999999999999-9f86d081884c7d65",
        "31622400001-9f86d081884c7d65",
    ] {
        assert!(text.parse::<LeaseId>().is_err(), "{text}");
    }
    let long = "x".repeat(1 << 20).parse::<LeaseId>().unwrap_err();
    assert!(long.to_string().len() < 200);
}

#[test]
fn clients_write_no_keys_of_leases_but_attachments() {
    let id = LeaseId::new(TTL_MIN, 7).unwrap();
    for key in ["k", "orthodrome/other", "", "orthodrome/lease"] {
        let key = Key::from(key);
        assert!(!is_reserved(&key) && !is_reserved(&id.attachment(&key)), "{key}");
    }
    for key in [id.record(), id.until(), id.due(Timestamp(1)), id.attachment(&"k".into())] {
        assert_eq!(is_reserved(&key), id.attached(&key).is_none(), "{key}");
        assert!(is_reserved(&id.attachment(&key)), "an attachment of {key}");
    }
    for key in ["orthodrome/lease/{x}/key/k", "orthodrome/lease/", "orthodrome/due/1"] {
        assert!(is_reserved(&key.into()), "{key}");
    }
}

#[test]
fn due_entries_are_in_the_order_of_time() {
    let id = LeaseId::new(TTL_MIN, 7).unwrap();
    let times = [0, 9, 10, 1_790_000_000_000_000_000, u64::MAX].map(Timestamp);
    let keys = times.map(|time| id.due(time));
    assert!(keys.is_sorted());
    assert!(keys.iter().all(|key| all_due().contains(key)));
    assert_eq!(keys.map(|key| parse_due(&key)), times.map(|time| Some((time, id))));
    for other in ["orthodrome/due/", "orthodrome/due/1/{1000-0000000000000007}", "x"] {
        assert_eq!(parse_due(&other.into()), None, "{other}");
    }
}

#[test]
fn keys_of_a_lease_are_in_one_partition_and_any_key_can_be_attached() {
    let id = LeaseId::new(TTL_MAX, u64::MAX).unwrap();
    let topology = crate::topology::Topology::uniform(3, TTL_MIN, TTL_MIN);
    let cluster = Cluster::spread(topology, 1, 1, 9, 3).unwrap();
    let home = cluster.partition_of(&id.record());
    assert!(id.gateway(&cluster).is_some());
    for bytes in [&b"k"[..], b"", b"a/{b}/c", b"\0\xff", b"}{"] {
        let key = Key::from(bytes);
        let attachment = id.attachment(&key);
        assert!(id.attachments().contains(&attachment));
        assert_eq!(id.attached(&attachment), Some(key));
        for own in [attachment, id.until(), id.due(Timestamp(5))] {
            assert_eq!(cluster.partition_of(&own), home, "{own}");
        }
    }
    assert_eq!(id.attached(&id.record()), None);
}
