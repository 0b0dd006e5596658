//! Fences: the keys that every scan reads, so that its place in the order of every stream is known
//! ([`orthodrome_core::scan`]).
//!
//! Nobody writes them. But transactions that read the same fence are ordered like writers of it,
//! and each leaves a *mark* there when it runs: a deletion with its timestamp. So their timestamps
//! grow along a fence. If the newest mark on a fence of a scan is not older than the scan's read,
//! then that read has run here, and with it everything that goes before it. Fences never move: with
//! one fence in each partition, the read is in every stream.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::scan::{self, KeyRange, Listing};
use orthodrome_core::txn::{Key, Version};

/// The fences that scans read: one in each partition and share. None if the placement has no room
/// for them; then nobody can scan.
pub(super) fn fences(cluster: &Cluster) -> OrdSet<Key> {
    scan::fences(cluster, true, &KeyRange::default()).unwrap_or_default().into_iter().collect()
}

/// Takes the marks on `fences` out of a list: each scan leaves new ones, and they are no deletions
/// of anything.
pub(super) fn hide(listing: &mut Listing, fences: &OrdSet<Key>) {
    let last = listing.names.last().filter(|_| listing.has_more).cloned();
    listing.names.retain(|name| name.deleted.is_none() || !fences.contains(&name.key));
    if listing.names.is_empty()
        && let Some(mut last) = last
    {
        // The scanner must know how far the list goes.
        last.deleted = Some(Version::INITIAL);
        listing.names.push(last);
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::scan::{Basis, Name};

    use super::*;

    #[test]
    fn a_list_without_marks_still_says_how_far_it_goes() {
        let name = |key: &str, deleted| Name { key: Key::from(key), deleted };
        let fences = OrdSet::from([Key::from("\0fence0"), Key::from("b\0fence0")]);
        let mark = Some(Version { timestamp: orthodrome_core::Timestamp(7), ..Version::INITIAL });
        let names = vec![name("\0fence0", mark), name("a", None), name("b\0fence0", mark)];
        let mut listing = Listing { names, has_more: true, basis: Basis::Complete, changes: None };
        hide(&mut listing, &fences);
        assert_eq!(listing.names, [name("a", None)]);
        listing.names = vec![name("\0fence0", mark)];
        hide(&mut listing, &fences);
        assert_eq!(listing.names, [name("\0fence0", Some(Version::INITIAL))]);
        (listing.names, listing.has_more) = (vec![name("\0fence0", mark)], false);
        hide(&mut listing, &fences);
        assert_eq!(listing.names, []);
    }
}
