//! The event queue, ordered by time and then by order of scheduling.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use orthodrome_core::time::Time;

/// The time of an event, and the slot that holds it. The sequence number makes the order total:
/// events of one instant happen in the order in which they were scheduled.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Ticket {
    at: Time,
    sequence: u64,
    slot: u32,
}

/// Nanoseconds of one bucket, as a power of two: 131 µs. A busy simulation has some ten events in a
/// bucket. With fewer, each ticket lies in a cache line of its own.
const BUCKET_BITS: u32 = 17;

/// Buckets of the ring: 134 ms, longer than most messages travel.
const BUCKETS: u64 = 1 << 10;

/// The bucket that an instant lies in, counted from the start of the run.
fn bucket_of(at: Time) -> u64 {
    at.0 >> BUCKET_BITS
}

/// A priority queue of events: a calendar. Tickets of the bucket that time is in are in a small heap.
/// Those of later buckets lie unsorted in a ring of buckets until time comes to them, and those behind
/// the ring are in a heap of their own. So most tickets cost the same however many there are. The
/// events themselves stay where they were put in a slab whose slots are used again, so that a steady
/// run allocates nothing.
#[derive(Debug)]
pub struct Queue<E> {
    /// Every ticket of bucket `today` or an earlier one.
    due: BinaryHeap<Reverse<Ticket>>,
    today: u64,
    /// Tickets of the buckets after `today`, by bucket modulo [`BUCKETS`].
    ring: Vec<Vec<Reverse<Ticket>>>,
    /// One bit for each bucket of the ring that holds something.
    filled: [u64; (BUCKETS / 64) as usize],
    /// Tickets of buckets at least [`BUCKETS`] after `today`.
    far: BinaryHeap<Reverse<Ticket>>,
    slots: Vec<Option<E>>,
    free: Vec<u32>,
    sequence: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self {
            due: BinaryHeap::new(),
            today: 0,
            ring: Vec::new(),
            filled: [0; (BUCKETS / 64) as usize],
            far: BinaryHeap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            sequence: 0,
        }
    }
}

impl<E> Queue<E> {
    /// Schedules `event` at `at`, after all events already scheduled for that instant.
    ///
    /// # Panics
    /// If more than 2^32 events are scheduled at once.
    pub fn push(&mut self, at: Time, event: E) {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                u32::try_from(self.slots.len() - 1).unwrap_or_else(|_| {
                    unreachable!("more than 2^32 events scheduled: the run has no bound")
                })
            }
        };
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(event);
        }
        self.sequence += 1;
        self.enter(Ticket { at, sequence: self.sequence, slot });
    }

    fn enter(&mut self, ticket: Ticket) {
        let bucket = bucket_of(ticket.at);
        if bucket <= self.today {
            self.due.push(Reverse(ticket));
        } else if bucket - self.today >= BUCKETS {
            self.far.push(Reverse(ticket));
        } else {
            if self.ring.is_empty() {
                self.ring.resize_with(BUCKETS as usize, Vec::new);
            }
            let place = (bucket % BUCKETS) as usize;
            if let (Some(bucket), Some(word)) =
                (self.ring.get_mut(place), self.filled.get_mut(place / 64))
            {
                bucket.push(Reverse(ticket));
                *word |= 1 << (place % 64);
            }
        }
    }

    /// The first bucket after `today` that holds something.
    fn next_filled(&self) -> Option<u64> {
        let first = self.today + 1;
        let start = (first % BUCKETS) as usize;
        let words = self.filled.len();
        // The word that the search starts in is looked at twice: its upper bits first, then its lower.
        (0..=words).find_map(|step| {
            let at = (start / 64 + step) % words;
            let word = self.filled.get(at).copied().unwrap_or(0);
            let upper = u64::MAX << (start % 64);
            let word = match step {
                0 => word & upper,
                _ if step == words => word & !upper,
                _ => word,
            };
            let place = at as u64 * 64 + u64::from(word.trailing_zeros());
            (word != 0).then(|| first + (place + BUCKETS - start as u64) % BUCKETS)
        })
    }

    /// Moves time on to the next bucket that holds something; false if there is none.
    fn advance(&mut self) -> bool {
        let near = self.next_filled();
        let far = self.far.peek().map(|Reverse(ticket)| bucket_of(ticket.at));
        let Some(next) = near.into_iter().chain(far).min() else { return false };
        self.today = next;
        if near == Some(next) {
            let place = (next % BUCKETS) as usize;
            if let (Some(bucket), Some(word)) =
                (self.ring.get_mut(place), self.filled.get_mut(place / 64))
            {
                // Each takes the other's memory.
                let empty = std::mem::take(&mut self.due).into_vec();
                self.due = std::mem::replace(bucket, empty).into();
                *word &= !(1 << (place % 64));
            }
        }
        while let Some(&Reverse(ticket)) = self.far.peek()
            && bucket_of(ticket.at) < next + BUCKETS
        {
            self.far.pop();
            self.enter(ticket);
        }
        true
    }

    /// Takes the next event if it is due by `limit`.
    pub fn pop(&mut self, limit: Time) -> Option<(Time, E)> {
        if self.due.is_empty() && !self.advance() {
            return None;
        }
        let &Reverse(Ticket { at, slot, .. }) = self.due.peek()?;
        if at > limit {
            return None;
        }
        self.due.pop();
        self.free.push(slot);
        let event = self.slots.get_mut(slot as usize).and_then(Option::take);
        Some((at, event.unwrap_or_else(|| unreachable!("a ticket in the queue owns its slot"))))
    }

    /// Reschedules every event to the time that `when` returns for it. Events of the same instant
    /// keep the order in which they were scheduled.
    pub fn reschedule(&mut self, when: impl Fn(&E, Time) -> Time) {
        let mut all = std::mem::take(&mut self.due).into_vec();
        all.extend(self.ring.iter_mut().flat_map(std::mem::take));
        all.extend(std::mem::take(&mut self.far));
        self.filled.fill(0);
        for Reverse(ticket) in all {
            let event = self.slots.get(ticket.slot as usize).and_then(Option::as_ref);
            let at = event.map_or(ticket.at, |event| when(event, ticket.at));
            self.enter(Ticket { at, ..ticket });
        }
    }

    /// The time of the next event.
    #[must_use]
    pub fn next_at(&self) -> Option<Time> {
        let near = || {
            let place = (self.next_filled()? % BUCKETS) as usize;
            self.ring.get(place)?.iter().map(|Reverse(ticket)| ticket.at).min()
        };
        let far = || self.far.peek().map(|Reverse(ticket)| ticket.at);
        let due = self.due.peek().map(|Reverse(ticket)| ticket.at);
        due.or_else(|| near().into_iter().chain(far()).min())
    }

    /// The number of scheduled events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// True if no event is scheduled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn events_come_out_as_a_stable_sort_would_order_them(
            times in proptest::collection::vec((0_u64..50, any::<bool>()), 0..200),
            // Within a bucket, over many buckets of the ring, and far behind it.
            unit in proptest::sample::select(vec![1_u64, 7 << 10, 3 << 20, 5 << 30]),
        ) {
            // `true` takes one event out in between, so that slots are reused.
            let mut queue = Queue::default();
            let mut model: Vec<(Time, usize)> = Vec::new();
            let mut low = Time::ZERO;
            for (number, (at, take)) in times.into_iter().enumerate() {
                let at = low.max(Time(at * unit));
                queue.push(at, number);
                model.push((at, number));
                if take {
                    model.sort();
                    prop_assert_eq!(queue.next_at(), model.first().map(|first| first.0));
                    // Nothing is due yet, and what is scheduled next may come before the first.
                    prop_assert_eq!(queue.pop(Time(model[0].0.0 / 2)).is_some(), model[0].0.0 == 0);
                    if model[0].0.0 == 0 {
                        model.remove(0);
                        continue;
                    }
                    let (at, event) = queue.pop(Time::MAX).unwrap();
                    prop_assert_eq!((at, event), model.remove(0));
                    low = at;
                }
            }
            model.sort();
            let rest: Vec<_> = std::iter::from_fn(|| queue.pop(Time::MAX)).collect();
            prop_assert_eq!(rest, model);
            prop_assert!(queue.slots.iter().all(Option::is_none));
        }
    }

    #[test]
    fn nothing_is_taken_before_its_time() {
        let mut queue = Queue::default();
        queue.push(Time(10), 'a');
        assert_eq!(queue.pop(Time(9)), None);
        assert_eq!(queue.next_at(), Some(Time(10)));
        assert_eq!(queue.pop(Time(10)), Some((Time(10), 'a')));
        assert!(queue.is_empty());
    }

    #[test]
    fn rescheduled_events_keep_their_order() {
        let mut queue = Queue::default();
        for (at, name) in [(30, 'c'), (10, 'a'), (20, 'b'), (15, 'x')] {
            queue.push(Time(at), name);
        }
        queue.reschedule(|&name, at| if name == 'x' { at } else { Time(at.0 / 10) });
        let order = std::iter::from_fn(|| queue.pop(Time(100)));
        let expected = [(1, 'a'), (2, 'b'), (3, 'c'), (15, 'x')].map(|(at, name)| (Time(at), name));
        assert_eq!(order.collect::<Vec<_>>(), expected);
    }
}
