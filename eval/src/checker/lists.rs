//! What list-append histories show without any help from the database.
//!
//! Lists only grow, so every committed read of a key is a prefix of the same final list. The
//! longest of these reads, the *trunk*, gives the order of the versions up to its length. Appends
//! that committed but that nobody read (the *tail*) come after the whole trunk, in an order that
//! nobody can have observed. Hence the graph is exact: an order of the attempts explains all reads
//! if and only if it respects the graph.

use orthodrome_core::ordered::{OrdMap, OrdSet};

use super::effects::Effects;
use super::graph::{Builder, Label, Reason};
use super::verdict::{Findings, MAX_OF_A_KIND, Phenomenon};
use super::words::{list_text, read_text};
use crate::history::dense::Dense;
use crate::history::{History, KeyId, ListRef, OpRef, Status};

const NONE: u32 = u32::MAX;

/// One append.
#[derive(Clone, Copy, Debug)]
pub(super) struct Append {
    pub(super) element: u64,
    pub(super) attempt: u32,
    /// False if the same attempt appends to the same key again later.
    is_last: bool,
}

/// All appends, by key and element.
#[derive(Debug)]
pub(super) struct Appends {
    rows: Dense<Append>,
    /// Where each key's rows start; one more at the end.
    starts: Dense<u32>,
}

impl Appends {
    /// Collects all appends. If several attempts append the same element, the one that did not fail
    /// represents all of them.
    pub(super) fn new(history: &History, findings: &mut Findings) -> Self {
        let mut all = gather(history);
        all.sort_unstable_by_key(|(key, append)| {
            let has_failed = history.status(append.attempt) == Status::Fail;
            (*key, append.element, has_failed, append.attempt)
        });
        let mut rows = Dense::default();
        let mut starts = Dense::filled(0, history.keys_len() + 1);
        for same in all.chunk_by(|(k, a), (l, b)| (k, a.element) == (l, b.element)) {
            let Some(&(key, append)) = same.first() else { continue };
            rows.push(append);
            starts[key + 1] = rows.len();
            if let Some((_, second)) = same.get(1)
                && history.status(second.attempt) != Status::Fail
            {
                findings.note(Phenomenon::AmbiguousAppend, || {
                    let (a, b) = (history.txn(append.attempt), history.txn(second.attempt));
                    let (key, element) = (history.key_name(key), append.element);
                    format!(
                        "{a} and {b} both append {element} to {key} and neither failed; record \
                         different elements"
                    )
                });
            }
        }
        for key in 0..history.keys_len() {
            starts[key + 1] = starts[key + 1].max(starts[key]);
        }
        Self { rows, starts }
    }

    /// The append of an element.
    pub(super) fn find(&self, key: KeyId, element: u64) -> Option<u32> {
        let start = self.starts[key];
        let rows = self.rows.slice(start..self.starts[key + 1]);
        let found = rows.binary_search_by_key(&element, |append| append.element).ok()?;
        Some(start + found as u32)
    }

    /// That append.
    pub(super) fn row(&self, append: u32) -> Append {
        self.rows[append]
    }
}

fn gather(history: &History) -> Vec<(KeyId, Append)> {
    let mut all = Vec::new();
    let mut last_in = Dense::filled(NONE, history.keys_len());
    for attempt in history.attempts() {
        for op in history.ops(attempt).rev() {
            if let OpRef::Append { key, element } = op {
                let is_last = std::mem::replace(&mut last_in[key], attempt) != attempt;
                all.push((key, Append { element, attempt, is_last }));
            }
        }
    }
    all
}

/// The version order of every list.
#[derive(Debug)]
pub(super) struct Lists<'a> {
    history: &'a History,
    effects: &'a Effects,
    appends: &'a Appends,
    trunks: Dense<&'a [u64]>,
    /// For each position in each trunk, the append that put the element there, if one did.
    placed: Dense<u32>,
    placed_starts: Dense<u32>,
    /// For each append, its first position in its trunk, or [`NONE`].
    place_of: Dense<u32>,
    /// By key, the attempts whose appends took effect and are in no trunk, in ascending order.
    tails: Dense<u32>,
    tail_starts: Dense<u32>,
    /// Junctions of each key's tail; see [`Self::add_tails`].
    tail_junctions: Dense<u32>,
}

impl<'a> Lists<'a> {
    /// The first elements of the key's version order.
    pub(super) fn trunk(&self, key: KeyId) -> &'a [u64] {
        self.trunks[key]
    }

    /// The length of the shortest list that has the element, if a committed transaction read it.
    pub(super) fn length_with(&self, key: KeyId, element: u64) -> Option<u32> {
        let place = self.place_of[self.appends.find(key, element)?];
        (place != NONE).then(|| place + 1)
    }

    /// Derives the version orders, and reports elements that cannot be there.
    pub(super) fn new(
        history: &'a History,
        effects: &'a Effects,
        appends: &'a Appends,
        trunks: Dense<&'a [u64]>,
        findings: &mut Findings,
    ) -> Self {
        let mut lists = Self {
            history,
            effects,
            appends,
            trunks,
            placed: Dense::default(),
            placed_starts: Dense::default(),
            place_of: Dense::filled(NONE, appends.rows.len()),
            tails: Dense::default(),
            tail_starts: Dense::default(),
            tail_junctions: Dense::filled(NONE, history.keys_len()),
        };
        let mut suspects = Vec::new();
        let mut counts = OrdMap::new();
        for key in lists.trunks.ids() {
            lists.placed_starts.push(lists.placed.len());
            for (place, element) in lists.trunks[key].iter().enumerate() {
                let found = appends.find(key, *element);
                let phenomenon = match found {
                    None => Some(Phenomenon::GarbageRead),
                    Some(append) if lists.place_of[append] != NONE => {
                        Some(Phenomenon::DuplicateAppend)
                    }
                    Some(append) => {
                        lists.place_of[append] = place as u32;
                        let has_failed = !effects.took[appends.rows[append].attempt];
                        has_failed.then_some(Phenomenon::G1a)
                    }
                };
                lists.placed.push(if phenomenon.is_none() { found.unwrap_or(NONE) } else { NONE });
                if let Some(phenomenon) = phenomenon {
                    let count = counts.entry(phenomenon).or_insert(0);
                    *count += 1;
                    if *count <= MAX_OF_A_KIND {
                        suspects.push((phenomenon, key, place));
                    } else {
                        findings.leave_out(1);
                    }
                }
            }
        }
        lists.report(&suspects, findings);
        lists.gather_tails();
        lists
    }

    fn gather_tails(&mut self) {
        for key in self.trunks.ids() {
            self.tail_starts.push(self.tails.len());
            let rows = self.appends.starts[key]..self.appends.starts[key + 1];
            let mut tail: Vec<u32> = rows
                .filter(|append| self.place_of[*append] == NONE)
                .map(|append| self.appends.rows[append].attempt)
                .filter(|attempt| self.effects.took[*attempt])
                .collect();
            tail.sort_unstable();
            tail.dedup();
            for attempt in tail {
                self.tails.push(attempt);
            }
        }
        self.tail_starts.push(self.tails.len());
    }

    /// Reports elements of trunks, each with the first transaction that read it.
    fn report(&self, suspects: &[(Phenomenon, KeyId, usize)], findings: &mut Findings) {
        if suspects.is_empty() {
            return;
        }
        let mut witnesses = vec![None; suspects.len()];
        for attempt in self.history.attempts().filter(|attempt| self.effects.took[*attempt]) {
            for op in self.history.ops(attempt) {
                let OpRef::ReadList { key, list } = op else { continue };
                let Ok(len) = self.resolve(key, list) else { continue };
                for ((_, suspect, place), witness) in suspects.iter().zip(&mut witnesses) {
                    if *suspect == key && *place < len && witness.is_none() {
                        *witness = Some(attempt);
                    }
                }
            }
        }
        for ((phenomenon, key, place), witness) in suspects.iter().zip(witnesses) {
            let element = self.trunks[*key].get(*place).copied().unwrap_or_default();
            let Some(reader) = witness else { continue };
            self.note_element(*phenomenon, *key, element, reader, findings);
        }
    }

    fn note_element(
        &self,
        phenomenon: Phenomenon,
        key: KeyId,
        element: u64,
        reader: u32,
        findings: &mut Findings,
    ) {
        findings.note(phenomenon, || {
            let read = read_text(self.history, &self.trunks, reader, key);
            let writer = self.appends.find(key, element).map(|append| {
                let attempt = self.appends.rows[append].attempt;
                self.history.txn(attempt)
            });
            match (phenomenon, writer) {
                (Phenomenon::G1a, Some(writer)) => {
                    format!("{read} with {element}, which {writer} appended, but {writer} aborted")
                }
                (_, Some(writer)) => {
                    format!("{read} with {element} twice, which {writer} appended once")
                }
                (_, None) => format!("{read} with {element}, which no transaction appended"),
            }
        });
    }

    /// The length of a read list if it is a prefix of the trunk, else the list.
    fn resolve(&self, key: KeyId, list: ListRef) -> Result<usize, &'a [u64]> {
        match list {
            ListRef::Prefix(len) => Ok(len as usize),
            ListRef::Odd(odd) => {
                let list = self.history.odd_list(odd);
                if self.trunks[key].starts_with(list) { Ok(list.len()) } else { Err(list) }
            }
        }
    }

    /// The attempt that put the element at a position of the trunk, if that is certain, and whether
    /// this was its last append to the key.
    fn writer(&self, key: KeyId, place: usize) -> Option<(u32, bool)> {
        let append = self.placed[self.placed_starts[key] + place as u32];
        (append != NONE).then(|| {
            let append = self.appends.rows[append];
            (append.attempt, append.is_last)
        })
    }

    fn tail(&self, key: KeyId) -> &[u32] {
        self.tails.slice(self.tail_starts[key]..self.tail_starts[key + 1])
    }

    /// Adds all edges, and reports reads that contradict each other or the trunk.
    pub(super) fn add_edges(&mut self, builder: &mut Builder, findings: &mut Findings) {
        self.add_tails(builder);
        for key in self.trunks.ids() {
            let mut previous = None;
            for place in 0..self.trunks[key].len() {
                let Some((writer, _)) = self.writer(key, place) else { continue };
                if let Some(previous) = previous.filter(|previous| *previous != writer) {
                    builder.edge(previous, writer, Label::new(Reason::Ww, key));
                }
                previous = Some(writer);
            }
            if let Some(previous) = previous {
                self.before_tail(previous, Label::new(Reason::Ww, key), builder);
            }
        }
        let mut seen = Dense::filled(Seen::default(), self.history.keys_len());
        for attempt in self.history.attempts().filter(|attempt| self.effects.took[*attempt]) {
            self.add_reads(attempt, &mut seen, builder, findings);
        }
    }

    /// The tail of a key is a set of `n` attempts. Every attempt that read the whole trunk precedes
    /// all of them except itself. Two chains of junctions keep that linear. Junction `i` of the
    /// first chain leads to attempt `i` and to junction `i + 1`, so to attempts `i..n`. Junction
    /// `i` of the second chain leads to attempt `i` and to junction `i - 1`, so to attempts
    /// `0..=i`.
    fn add_tails(&mut self, builder: &mut Builder) {
        for key in self.trunks.ids() {
            let tail = self.tail(key).to_vec();
            if tail.len() < 2 {
                continue;
            }
            let first: Vec<u32> = tail.iter().map(|_| builder.junction()).collect();
            let second: Vec<u32> = tail.iter().map(|_| builder.junction()).collect();
            for chain in [&first, &second] {
                for (junction, attempt) in chain.iter().zip(&tail) {
                    builder.edge(*junction, *attempt, Label::JUNCTION);
                }
            }
            for (junction, next) in first.iter().zip(first.iter().skip(1)) {
                builder.edge(*junction, *next, Label::JUNCTION);
            }
            for (junction, next) in second.iter().zip(second.iter().skip(1)) {
                builder.edge(*next, *junction, Label::JUNCTION);
            }
            self.tail_junctions[key] = first.first().copied().unwrap_or(NONE);
        }
    }

    /// Records that an attempt precedes the whole tail of a key, except itself.
    fn before_tail(&self, attempt: u32, label: Label, builder: &mut Builder) {
        let tail = self.tail(label.key());
        let first = self.tail_junctions[label.key()];
        match (tail, tail.binary_search(&attempt)) {
            ([], _) | ([_], Ok(_)) => {}
            ([only], Err(_)) => builder.edge(attempt, *only, label),
            (_, Err(_)) => builder.edge(attempt, first, label),
            (_, Ok(place)) => {
                let (place, len) = (place as u32, tail.len() as u32);
                if place + 1 < len {
                    builder.edge(attempt, first + place + 1, label);
                }
                if place > 0 {
                    builder.edge(attempt, first + len + place - 1, label);
                }
            }
        }
    }

    /// Goes through one attempt's operations in order.
    fn add_reads(
        &self,
        attempt: u32,
        seen: &mut Dense<Seen<'a>>,
        builder: &mut Builder,
        findings: &mut Findings,
    ) {
        let mut own: Vec<(KeyId, u64)> = Vec::new();
        for op in self.history.ops(attempt) {
            let (key, list) = match op {
                OpRef::Append { key, element } => {
                    if let Some((_, before)) = own.iter().rfind(|(k, _)| *k == key) {
                        self.check_program_order(attempt, key, *before, element, findings);
                    }
                    own.push((key, element));
                    continue;
                }
                OpRef::ReadList { key, list } => (key, list),
                OpRef::ReadVersion { .. } | OpRef::Write { .. } => continue,
            };
            let resolved = self.resolve(key, list);
            let raw = match resolved {
                Ok(len) => self.trunks[key].get(..len).unwrap_or_default(),
                Err(list) => list,
            };
            let Some(before) = strip(raw, key, &own) else {
                findings.note(Phenomenon::Internal, || self.missed_own(attempt, key, raw, &own));
                continue;
            };
            let first = &mut seen[key];
            if first.by == attempt + 1 {
                if first.before != before {
                    let first = first.before;
                    findings.note(Phenomenon::Internal, || {
                        let (txn, key) = (self.history.txn(attempt), self.history.key_name(key));
                        let (first, before) = (list_text(first), list_text(before));
                        format!("{txn} found first {first} and then {before} in {key}")
                    });
                }
                continue;
            }
            *first = Seen { by: attempt + 1, before };
            match resolved {
                Ok(_) => self.add_read(attempt, key, before.len(), builder, findings),
                Err(list) => self.incompatible(attempt, key, list, findings),
            }
        }
    }

    /// Adds the edges of a read of the first `len` elements of the trunk.
    fn add_read(
        &self,
        attempt: u32,
        key: KeyId,
        len: usize,
        builder: &mut Builder,
        findings: &mut Findings,
    ) {
        let last = len.checked_sub(1).and_then(|place| self.writer(key, place));
        match last {
            Some((writer, _)) if writer == attempt => {
                return findings.note(Phenomenon::Internal, || {
                    let read = read_text(self.history, &self.trunks, attempt, key);
                    format!("{read}, which ends with an element that it appended only later")
                });
            }
            Some((writer, false)) => {
                return findings.note(Phenomenon::G1b, || {
                    let read = read_text(self.history, &self.trunks, attempt, key);
                    let writer = self.history.txn(writer);
                    format!("{read} between two appends of {writer}")
                });
            }
            Some((writer, true)) => builder.edge(writer, attempt, Label::new(Reason::Wr, key)),
            None => {}
        }
        let label = Label::new(Reason::Rw, key);
        if len == self.trunks[key].len() {
            self.before_tail(attempt, label, builder);
        } else if let Some((next, _)) = self.writer(key, len).filter(|(next, _)| *next != attempt) {
            builder.edge(attempt, next, label);
        }
    }

    /// Checks two appends by one attempt to one key: the later one must not be in the list before
    /// the earlier one, nor without it.
    fn check_program_order(
        &self,
        attempt: u32,
        key: KeyId,
        before: u64,
        element: u64,
        findings: &mut Findings,
    ) {
        let place = |element| {
            let append = self.appends.find(key, element)?;
            (self.appends.rows[append].attempt == attempt).then(|| self.place_of[append])
        };
        if let (Some(first), Some(second)) = (place(before), place(element))
            && second < first
        {
            findings.note(Phenomenon::IncompatibleOrder, || {
                let (txn, name) = (self.history.txn(attempt), self.history.key_name(key));
                let trunk = list_text(self.trunks[key]);
                format!(
                    "{txn} appended {before} before {element} to {name}, but others read \
                     {name}={trunk}"
                )
            });
        }
    }

    fn missed_own(&self, attempt: u32, key: KeyId, raw: &[u64], own: &[(KeyId, u64)]) -> String {
        let elements: Vec<u64> = own.iter().filter(|(k, _)| *k == key).map(|(_, e)| *e).collect();
        let (txn, key) = (self.history.txn(attempt), self.history.key_name(key));
        let (own, raw) = (list_text(&elements), list_text(raw));
        format!("{txn} appended {own} to {key} and then read {key}={raw}, which does not end so")
    }

    fn incompatible(&self, attempt: u32, key: KeyId, list: &[u64], findings: &mut Findings) {
        findings.note(Phenomenon::IncompatibleOrder, || {
            let trunk = self.trunks[key];
            let place = list.iter().zip(trunk).take_while(|(a, b)| a == b).count();
            let (txn, name) = (self.history.txn(attempt), self.history.key_name(key));
            let (a, b) = (list_text(list), list_text(trunk));
            format!(
                "{txn} read {name}={a}, others read {name}={b}; they differ at place {place}, and \
                 lists only grow"
            )
        });
        let mut earlier = OrdSet::new();
        for element in list {
            let phenomenon = match self.appends.find(key, *element) {
                None => Phenomenon::GarbageRead,
                Some(_) if !earlier.insert(*element) => Phenomenon::DuplicateAppend,
                Some(append) if !self.effects.took[self.appends.rows[append].attempt] => {
                    Phenomenon::G1a
                }
                Some(_) => continue,
            };
            self.note_element(phenomenon, key, *element, attempt, findings);
        }
    }
}

/// What a transaction read of a key before its own appends.
#[derive(Clone, Copy, Debug, Default)]
struct Seen<'a> {
    /// The number of the attempt, plus one.
    by: u32,
    before: &'a [u64],
}

/// The list without the attempt's own appends at its end; none if they are not there.
fn strip<'a>(raw: &'a [u64], key: KeyId, own: &[(KeyId, u64)]) -> Option<&'a [u64]> {
    let mut rest = raw;
    for (_, element) in own.iter().rev().filter(|(k, _)| *k == key) {
        rest = rest.strip_suffix(&[*element])?;
    }
    Some(rest)
}
