//! The Mersenne Twister as Python seeds and uses it, for repeating the draws of published
//! simulators. Our own draws come from [`crate::math::rng`].

const WORDS: usize = 624;
const SHIFT: usize = 397;

/// Python's `random.Random(seed)`.
#[derive(Clone, Debug)]
pub struct Twister {
    words: Box<[u32; WORDS]>,
    next: usize,
}

impl Twister {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        let mut words = Box::new([0; WORDS]);
        words[0] = 19_650_218;
        for i in 1..WORDS {
            let last: u32 = words[i - 1];
            words[i] = 1_812_433_253_u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(i as u32);
        }
        let low = seed as u32;
        let high = (seed >> 32) as u32;
        let key: &[u32] = if high == 0 { &[low] } else { &[low, high] };
        let mixed = |words: &[u32; WORDS], i: usize, factor: u32| {
            let last = words[i - 1];
            words[i] ^ (last ^ (last >> 30)).wrapping_mul(factor)
        };
        let mut i = 1;
        for (k, key) in (0..key.len()).zip(key).cycle().take(WORDS) {
            let sum = mixed(&words, i, 1_664_525).wrapping_add(*key);
            words[i] = sum.wrapping_add(k as u32);
            i = wrapped(&mut words, i);
        }
        for _ in 1..WORDS {
            words[i] = mixed(&words, i, 1_566_083_941).wrapping_sub(i as u32);
            i = wrapped(&mut words, i);
        }
        words[0] = 1 << 31;
        Self { words, next: WORDS }
    }

    /// The next 32 random bits.
    fn word(&mut self) -> u32 {
        if self.next == WORDS {
            self.twist();
        }
        let mut y = self.words[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for i in 0..WORDS {
            let y = (self.words[i] & (1 << 31)) | (self.words[(i + 1) % WORDS] & !(1 << 31));
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[i] = self.words[(i + SHIFT) % WORDS] ^ (y >> 1) ^ odd;
        }
        self.next = 0;
    }

    /// `randrange(n)`, for `n` from 1 to 2³² − 1.
    pub fn below(&mut self, n: usize) -> usize {
        let n = u32::try_from(n).expect("draws among fewer than 2^32");
        assert!(n > 0, "a draw needs at least one value");
        loop {
            let drawn = self.word() >> n.leading_zeros();
            if drawn < n {
                return drawn as usize;
            }
        }
    }

    /// `sample(range(n), 2)`.
    pub fn two_of(&mut self, n: usize) -> [usize; 2] {
        let first = self.below(n);
        if n <= 21 {
            // Drawn from a pool in which the last element has replaced the first drawn one.
            let second = self.below(n - 1);
            return [first, if second == first { n - 1 } else { second }];
        }
        loop {
            let second = self.below(n);
            if second != first {
                return [first, second];
            }
        }
    }
}

/// The next index; the second follows the last.
fn wrapped(words: &mut [u32; WORDS], i: usize) -> usize {
    if i + 1 < WORDS {
        return i + 1;
    }
    words[0] = words[WORDS - 1];
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_as_python_does() {
        let draws = |seed: u64| {
            let mut twister = Twister::new(seed);
            [2, 3, 3, 1, 7, 100, 1_000_000].map(|n| twister.below(n))
        };
        assert_eq!(draws(0), [1, 1, 0, 0, 4, 62, 424_604]);
        assert_eq!(draws(5), [1, 2, 1, 0, 6, 59, 813_651]);
        assert_eq!(draws((7 << 32) + 3), [0, 2, 2, 0, 3, 16, 460_236]);
        let mut twister = Twister::new(2);
        assert_eq!(
            (0..2000).map(|_| twister.below(1000)).skip(1997).collect::<Vec<_>>(),
            [492, 678, 302]
        );
    }

    #[test]
    fn takes_two_as_python_does() {
        let mut twister = Twister::new(1);
        let pairs = [2, 3, 5, 21, 22, 90].map(|n| twister.two_of(n));
        assert_eq!(pairs, [[0, 1], [1, 0], [3, 4], [15, 12], [6, 3], [62, 3]]);
    }
}
