//! Which instructions the processor has beyond those that every processor of its kind has.
//!
//! What runs for each value asks nothing: a plan knows, from when it is compiled, and whole arrays or rows of scalars
//! are read at once by one set of functions or the other. Both do the same to the same bytes.

/// A set of instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Isa {
    /// What the compiler may take for granted.
    #[default]
    Portable,
    /// AVX2, and the bit manipulation that came with it, on processors where that is fast.
    #[cfg(target_arch = "x86_64")]
    Avx2(crate::x86::Avx2),
}

impl Isa {
    /// The best that this processor has.
    pub(crate) fn best() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = crate::x86::Avx2::detect() {
            return Isa::Avx2(avx2);
        }
        Isa::Portable
    }

    /// All that this processor has.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Isa> {
        let mut all = vec![Isa::Portable];
        all.extend((Isa::best() != Isa::Portable).then(Isa::best));
        all
    }
}
