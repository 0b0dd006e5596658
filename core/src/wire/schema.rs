//! The list of all fields of a type, for the test that compares versions.

use std::collections::{BTreeMap, BTreeSet};

use super::Wire;

/// One member of a type: a field or a variant.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Member {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Its type; empty for a variant without fields.
    pub of: String,
}

/// The fields and variants of a type, and of all types that it contains.
#[derive(Clone, Default, Debug)]
pub struct Schema {
    types: BTreeMap<&'static str, Option<Vec<Member>>>,
}

impl Schema {
    /// The schema of `T` and of all types that it contains.
    #[must_use]
    pub fn of<T: Wire>() -> Self {
        let mut schema = Self::default();
        T::schema(&mut schema);
        schema
    }

    /// True if `name` is new: its members are then added with [`Schema::end`].
    pub fn begin(&mut self, name: &'static str) -> bool {
        let is_new = !self.types.contains_key(name);
        if is_new {
            self.types.insert(name, None);
        }
        is_new
    }

    /// Adds the members of a type.
    pub fn end(&mut self, name: &'static str, members: Vec<Member>) {
        self.types.insert(name, Some(members));
    }

    /// One line for each member: type, number, name and type of the member; sorted.
    #[must_use]
    pub fn lines(&self) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        for (name, members) in &self.types {
            for member in members.iter().flatten() {
                let Member { number, name: field, of } = member;
                lines.insert(format!("{name} {number:>3} {field} {of}").trim_end().to_owned());
            }
        }
        lines
    }
}
