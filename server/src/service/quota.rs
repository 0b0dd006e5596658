//! Quotas: how many high-priority transactions a principal may begin (Natto §3.2: a shared
//! environment).

use std::sync::{Mutex, PoisonError};

use orthodrome_core::ordered::OrdMap;

use tokio::time::Instant;

use super::access::Principal;

/// The remaining quota of each principal. Unused quota is kept for one second.
#[derive(Default, Debug)]
pub(super) struct Quotas(Mutex<OrdMap<String, Left>>);

#[derive(Debug)]
struct Left {
    transactions: f64,
    since: Instant,
}

impl Quotas {
    /// Takes one transaction from the quota of `principal` at `now`; false if none is left.
    pub(super) fn take(&self, principal: &Principal, now: Instant) -> bool {
        let Some(most) = principal.high_priority_per_second.map(f64::from) else { return true };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left =
            all.entry(principal.name.clone()).or_insert(Left { transactions: most, since: now });
        let gained = now.saturating_duration_since(left.since).as_secs_f64() * most;
        *left = Left { transactions: (left.transactions + gained).min(most), since: now };
        let is_enough = left.transactions >= 1.0;
        if is_enough {
            left.transactions -= 1.0;
        }
        is_enough
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Role;
    use super::*;

    fn principal(name: &str, quota: Option<u32>) -> Principal {
        Principal { high_priority_per_second: quota, ..Principal::new(name, Role::Write) }
    }

    fn taken(quotas: &Quotas, who: &Principal, now: Instant) -> usize {
        (0..100).filter(|_| quotas.take(who, now)).count()
    }

    #[test]
    fn each_has_its_own_and_a_second_refills_it() {
        let (quotas, start) = (Quotas::default(), Instant::now());
        let (shop, other) = (principal("shop", Some(10)), principal("other", Some(3)));
        assert_eq!(taken(&quotas, &shop, start), 10);
        assert_eq!(taken(&quotas, &other, start), 3);
        assert_eq!(taken(&quotas, &shop, start + Duration::from_millis(500)), 5);
        let hour = start + Duration::from_secs(3_600);
        assert_eq!(taken(&quotas, &shop, hour), 10, "what is saved is bounded");
        assert_eq!(taken(&quotas, &shop, start), 0, "time that goes back brings nothing");
    }

    #[test]
    fn nothing_is_nothing_and_none_is_no_bound() {
        let (quotas, now) = (Quotas::default(), Instant::now());
        assert_eq!(taken(&quotas, &principal("guest", Some(0)), now), 0);
        assert_eq!(taken(&quotas, &principal("owner", None), now), 100);
    }
}
