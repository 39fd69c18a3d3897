//! The FNV-1a hash: the same for the same bytes on every machine and for ever. Not for hostile
//! input.

const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// The hash of some bytes.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    words(bytes.iter().map(|b| u64::from(*b)))
}

/// The same over whole words, each taken in at once.
pub fn words(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(BASIS, |hash, value| (hash ^ value).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_published_tests() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(words([0x61]), fnv1a(b"a"));
    }
}
