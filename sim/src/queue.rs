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

/// A priority queue of events. The heap moves small tickets. The events themselves stay in a slab
/// whose slots are reused, so a steady run allocates nothing.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<Reverse<Ticket>>,
    slots: Vec<Option<E>>,
    free: Vec<u32>,
    sequence: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), slots: Vec::new(), free: Vec::new(), sequence: 0 }
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
        self.heap.push(Reverse(Ticket { at, sequence: self.sequence, slot }));
    }

    /// Takes the next event if it is due by `limit`.
    pub fn pop(&mut self, limit: Time) -> Option<(Time, E)> {
        let &Reverse(Ticket { at, slot, .. }) = self.heap.peek()?;
        if at > limit {
            return None;
        }
        self.heap.pop();
        self.free.push(slot);
        let event = self.slots.get_mut(slot as usize).and_then(Option::take);
        Some((at, event.unwrap_or_else(|| unreachable!("a ticket in the heap owns its slot"))))
    }

    /// Reschedules every event to the time that `when` returns for it. Events of the same instant
    /// keep the order in which they were scheduled.
    pub fn reschedule(&mut self, when: impl Fn(&E, Time) -> Time) {
        let Self { heap, slots, .. } = self;
        let anew = std::mem::take(heap).into_iter().map(|Reverse(ticket)| {
            let event = slots.get(ticket.slot as usize).and_then(Option::as_ref);
            Reverse(Ticket {
                at: event.map_or(ticket.at, |event| when(event, ticket.at)),
                ..ticket
            })
        });
        *heap = anew.collect();
    }

    /// The time of the next event.
    #[must_use]
    pub fn next_at(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse(ticket)| ticket.at)
    }

    /// The number of scheduled events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// True if no event is scheduled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn events_come_out_as_a_stable_sort_would_order_them(
            times in proptest::collection::vec((0_u64..50, any::<bool>()), 0..200)
        ) {
            // `true` takes one event out in between, so that slots are reused.
            let mut queue = Queue::default();
            let mut model: Vec<(Time, usize)> = Vec::new();
            let mut low = Time::ZERO;
            for (number, (at, take)) in times.into_iter().enumerate() {
                let at = low.max(Time(at));
                queue.push(at, number);
                model.push((at, number));
                if take {
                    model.sort();
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
