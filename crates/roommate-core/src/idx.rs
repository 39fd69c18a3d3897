//! Dense typed indices, vectors by them, and sets of them.
//!
//! Inside the core every entity is a `u32` index into a vector; names exist only at the edge.
//! Indices are never reused, so a stale index can only refer to an entity that has ended.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// A dense index that can be turned into a position in a vector.
pub trait Idx: Copy + Ord {
    /// The index at this position.
    fn from_usize(i: usize) -> Self;
    /// The position in the vector it indexes.
    fn usize(self) -> usize;
}

macro_rules! index {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        #[derive(Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);
        impl Idx for $name {
            #[inline]
            fn from_usize(i: usize) -> Self {
                Self(u32::try_from(i).expect("fewer than 2^32 entities"))
            }
            #[inline]
            fn usize(self) -> usize { self.0 as usize }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { self.0.fmt(f) }
        }
    )*};
}

index! {
    /// A job or service, in order of registration.
    JobIdx
    /// A GPU; the GPUs of one node are contiguous.
    GpuIdx
    /// A node (a machine with GPUs).
    NodeIdx
    /// A profile: what is known of a job before it runs.
    ProfileIdx
    /// A team: the owner of jobs (an account in Slurm, a namespace in Kubernetes).
    TeamIdx
}

/// The GPUs of one job, ascending. Up to eight are stored inline, so the common gang allocates
/// nothing.
pub type GpuSet = SmallVec<[GpuIdx; 8]>;

/// A vector by a typed index: a GPU's number cannot read what belongs to jobs. Reads like a slice
/// where no index is involved.
#[derive(Clone, Debug, PartialEq)]
pub struct IdxVec<I, T> {
    items: Vec<T>,
    marker: PhantomData<I>,
}

impl<I: Idx, T> IdxVec<I, T> {
    /// An empty vector.
    #[inline]
    pub const fn new() -> Self {
        Self { items: Vec::new(), marker: PhantomData }
    }

    /// Adds a value at the end; returns its index.
    #[inline]
    pub fn push(&mut self, value: T) -> I {
        self.items.push(value);
        I::from_usize(self.items.len() - 1)
    }

    /// The value at this index, if there is one.
    #[inline]
    pub fn get(&self, i: I) -> Option<&T> {
        self.items.get(i.usize())
    }

    /// The value at this index, if there is one, to change it.
    #[inline]
    pub fn get_mut(&mut self, i: I) -> Option<&mut T> {
        self.items.get_mut(i.usize())
    }

    /// Whether there is a value at this index.
    #[inline]
    pub fn has(&self, i: I) -> bool {
        i.usize() < self.items.len()
    }

    /// All indices, ascending.
    #[inline]
    pub fn indices(&self) -> impl DoubleEndedIterator<Item = I> + ExactSizeIterator + use<I, T> {
        (0..self.items.len()).map(I::from_usize)
    }

    /// All values with their indices.
    #[inline]
    pub fn iter_enumerated(&self) -> impl DoubleEndedIterator<Item = (I, &T)> {
        self.items.iter().enumerate().map(|(i, value)| (I::from_usize(i), value))
    }

    /// The first index whose value fits.
    #[inline]
    pub fn position(&self, fits: impl FnMut(&T) -> bool) -> Option<I> {
        self.items.iter().position(fits).map(I::from_usize)
    }

    /// Grows, with what `fill` makes, until it is as long as another vector by the same index.
    /// Never shrinks.
    #[inline]
    pub fn grow_with<U>(&mut self, other: &IdxVec<I, U>, fill: impl FnMut() -> T) {
        if self.items.len() < other.items.len() {
            self.items.resize_with(other.items.len(), fill);
        }
    }

    /// Becomes empty, keeping its room.
    #[inline]
    pub fn clear(&mut self) {
        self.items.clear();
    }
}

impl<I: Idx, T: Clone> IdxVec<I, T> {
    /// Grows, with this value, until it is as long as another vector by the same index. Never
    /// shrinks.
    #[inline]
    pub fn grow_like<U>(&mut self, other: &IdxVec<I, U>, value: T) {
        self.grow_to(other.items.len(), value);
    }

    /// Grows, with this value, until it has this index. Never shrinks.
    #[inline]
    pub fn grow_for(&mut self, i: I, value: T) {
        self.grow_to(i.usize() + 1, value);
    }

    #[inline]
    fn grow_to(&mut self, len: usize, value: T) {
        if self.items.len() < len {
            self.items.resize(len, value);
        }
    }
}

impl<I: Idx, T> Index<I> for IdxVec<I, T> {
    type Output = T;
    #[inline]
    fn index(&self, i: I) -> &T {
        &self.items[i.usize()]
    }
}

impl<I: Idx, T> IndexMut<I> for IdxVec<I, T> {
    #[inline]
    fn index_mut(&mut self, i: I) -> &mut T {
        &mut self.items[i.usize()]
    }
}

impl<I, T> Deref for IdxVec<I, T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        &self.items
    }
}

impl<I, T> DerefMut for IdxVec<I, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items
    }
}

impl<I: Idx, T> Default for IdxVec<I, T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<I: Idx, T> From<Vec<T>> for IdxVec<I, T> {
    fn from(items: Vec<T>) -> Self {
        Self { items, marker: PhantomData }
    }
}

impl<I: Idx, T> FromIterator<T> for IdxVec<I, T> {
    fn from_iter<A: IntoIterator<Item = T>>(iter: A) -> Self {
        Self { items: iter.into_iter().collect(), marker: PhantomData }
    }
}

impl<'a, I, T> IntoIterator for &'a IdxVec<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;
    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        self.items.iter()
    }
}

impl<'a, I, T> IntoIterator for &'a mut IdxVec<I, T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;
    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        self.items.iter_mut()
    }
}

/// A set of dense indices: insert, remove and "first at or after" in constant time, iteration in
/// ascending order, no allocation once it has grown.
///
/// A tree of 64-bit words: a bit on level `k + 1` says that a word on level `k` is not empty.
#[derive(Clone, Debug)]
pub struct IdxSet<I> {
    levels: Vec<Vec<u64>>,
    len: usize,
    marker: PhantomData<I>,
}

impl<I> PartialEq for IdxSet<I> {
    /// Equal when both hold the same members, whatever their capacity.
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&self.levels[0], &other.levels[0]);
        let common = a.len().min(b.len());
        self.len == other.len && a[..common] == b[..common]
    }
}

impl<I> Default for IdxSet<I> {
    fn default() -> Self {
        Self { levels: vec![Vec::new()], len: 0, marker: PhantomData }
    }
}

impl<I: Idx> IdxSet<I> {
    /// How many members.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no member.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `i` is a member.
    pub fn contains(&self, i: I) -> bool {
        let i = i.usize();
        self.levels[0].get(i / 64).is_some_and(|w| w >> (i % 64) & 1 == 1)
    }

    /// Adds `i`; true if it was not a member before.
    pub fn insert(&mut self, i: I) -> bool {
        let i = i.usize();
        self.grow(i / 64 + 1);
        if self.levels[0][i / 64] >> (i % 64) & 1 == 1 {
            return false;
        }
        let mut at = i;
        for level in &mut self.levels {
            level[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
        self.len += 1;
        true
    }

    /// Removes `i`; true if it was a member.
    pub fn remove(&mut self, i: I) -> bool {
        if !self.contains(i) {
            return false;
        }
        let mut at = i.usize();
        for level in &mut self.levels {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                break;
            }
            at /= 64;
        }
        self.len -= 1;
        true
    }

    /// The smallest member.
    pub fn first(&self) -> Option<I> {
        self.first_from(0)
    }

    /// The smallest member at or after `from`.
    pub fn first_from(&self, from: usize) -> Option<I> {
        // Most lookups end in the first word: nodes of a small cluster, jobs with close indices.
        let word = self.levels[0].get(from / 64)? & (!0 << (from % 64));
        if word != 0 {
            return Some(I::from_usize(from / 64 * 64 + word.trailing_zeros() as usize));
        }
        let mut at = from;
        for (k, level) in self.levels.iter().enumerate() {
            let word = level.get(at / 64)? & (!0 << (at % 64));
            if word != 0 {
                let mut found = at / 64 * 64 + word.trailing_zeros() as usize;
                for lower in self.levels[..k].iter().rev() {
                    found = found * 64 + lower[found].trailing_zeros() as usize;
                }
                return Some(I::from_usize(found));
            }
            at = at / 64 + 1;
        }
        None
    }

    /// The smallest member above `last`, or of all: walks a set that changes meanwhile.
    #[inline]
    pub fn next_after(&self, last: Option<I>) -> Option<I> {
        self.first_from(last.map_or(0, |i| i.usize() + 1))
    }

    /// The members, ascending.
    pub fn iter(&self) -> impl Iterator<Item = I> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let found = self.first_from(next)?;
            next = found.usize() + 1;
            Some(found)
        })
    }

    fn grow(&mut self, words: usize) {
        if self.levels[0].len() >= words {
            return;
        }
        let mut need = words.next_power_of_two();
        let mut k = 0;
        loop {
            if k == self.levels.len() {
                // A new top level over a tree that had a single word.
                let below = self.levels[k - 1].first().is_some_and(|w| *w != 0);
                self.levels.push(vec![u64::from(below)]);
            }
            let level = &mut self.levels[k];
            level.resize(need.max(level.len()), 0);
            if need == 1 {
                return;
            }
            need = need.div_ceil(64);
            k += 1;
        }
    }
}

impl<I: Idx> FromIterator<I> for IdxSet<I> {
    fn from_iter<T: IntoIterator<Item = I>>(iter: T) -> Self {
        let mut set = Self::default();
        for i in iter {
            set.insert(i);
        }
        set
    }
}

/// Indices grouped by a key. Members of one group (shelf) are interchangeable, so a search costs
/// the number of groups.
#[derive(Clone, Debug)]
pub struct Shelves<K, I> {
    by_key: BTreeMap<K, IdxSet<I>>,
    keys: IdxVec<I, Option<K>>,
    /// Emptied sets, kept to reuse their allocations.
    spare: Vec<IdxSet<I>>,
}

impl<K, I: Idx> Default for Shelves<K, I> {
    fn default() -> Self {
        Self { by_key: BTreeMap::new(), keys: IdxVec::new(), spare: Vec::new() }
    }
}

impl<K: Ord + Copy, I: Idx> Shelves<K, I> {
    /// Moves `i` to the group of this key; `None` removes it from its group.
    pub fn set(&mut self, i: I, key: Option<K>) {
        self.keys.grow_for(i, None);
        let old = std::mem::replace(&mut self.keys[i], key);
        if old == key {
            return;
        }
        if let Some(old) = old
            && let Some(shelf) = self.by_key.get_mut(&old)
        {
            shelf.remove(i);
            if shelf.is_empty() {
                self.spare.extend(self.by_key.remove(&old));
            }
        }
        if let Some(key) = key {
            let spare = &mut self.spare;
            self.by_key.entry(key).or_insert_with(|| spare.pop().unwrap_or_default()).insert(i);
        }
    }

    /// The key of the group that holds `i`.
    pub fn key_of(&self, i: I) -> Option<&K> {
        self.keys.get(i)?.as_ref()
    }

    /// All groups that are not empty, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &IdxSet<I>)> {
        self.by_key.iter()
    }

    /// Members of the group of this key, ascending.
    pub fn on(&self, key: &K) -> impl Iterator<Item = I> {
        self.by_key.get(key).into_iter().flat_map(IdxSet::iter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_vector_by_index_grows_and_never_shrinks() {
        let mut names: IdxVec<GpuIdx, u8> = IdxVec::new();
        assert_eq!((names.push(7), names.push(8)), (GpuIdx(0), GpuIdx(1)));
        names[GpuIdx(0)] = 9;
        names.grow_for(GpuIdx(3), 1);
        names.grow_for(GpuIdx(0), 5);
        let other: IdxVec<GpuIdx, bool> = vec![true; 3].into();
        names.grow_like(&other, 5);
        assert_eq!(*names, [9, 8, 1, 1]);
        assert_eq!((names.get(GpuIdx(3)), names.get(GpuIdx(4))), (Some(&1), None));
        assert_eq!((names.has(GpuIdx(3)), names.has(GpuIdx(4))), (true, false));
        assert!(names.iter_enumerated().map(|(i, _)| i).eq(names.indices()));
        assert_eq!(
            (names.position(|n| *n == 1), names.position(|n| *n == 2)),
            (Some(GpuIdx(2)), None)
        );
    }

    proptest! {
        #[test]
        fn shelves_hold_what_was_last_put_there(
            puts in prop::collection::vec((0u32..40, prop::option::of(0u8..6)), 0..120)
        ) {
            let mut fast: Shelves<u8, JobIdx> = Shelves::default();
            let mut slow = BTreeMap::new();
            for (i, key) in puts {
                fast.set(JobIdx(i), key);
                slow.insert(JobIdx(i), key);
                let all = fast.iter().flat_map(|(k, set)| set.iter().map(|i| (*k, i)));
                let known = slow.iter().filter_map(|(i, k)| k.map(|k| (k, *i)));
                let mut known: Vec<_> = known.collect();
                known.sort_unstable();
                prop_assert_eq!(all.collect::<Vec<_>>(), known);
                prop_assert!(fast.iter().all(|(_, set)| !set.is_empty()));
                prop_assert_eq!(fast.key_of(JobIdx(i)).copied(), key);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn behaves_like_a_btree_set(
            ops in prop::collection::vec(
                (any::<bool>(), prop_oneof![0u32..200, 0u32..300_000]),
                0..200
            )
        ) {
            let mut fast = IdxSet::default();
            let mut slow = BTreeSet::new();
            for (insert, i) in ops {
                if insert {
                    prop_assert_eq!(fast.insert(JobIdx(i)), slow.insert(JobIdx(i)));
                } else {
                    prop_assert_eq!(fast.remove(JobIdx(i)), slow.remove(&JobIdx(i)));
                }
                prop_assert_eq!(fast.len(), slow.len());
                prop_assert_eq!(fast.first(), slow.first().copied());
                let from = JobIdx(i);
                prop_assert_eq!(fast.first_from(i as usize), slow.range(from..).next().copied());
            }
            let all: Vec<_> = slow.iter().copied().collect();
            prop_assert_eq!(fast.iter().collect::<Vec<_>>(), &all[..]);
            let walk = std::iter::successors(fast.next_after(None), |i| fast.next_after(Some(*i)));
            prop_assert_eq!(walk.collect::<Vec<_>>(), all);
        }
    }
}
