//! Instruction sets of the processor beyond the baseline of its architecture.
//!
//! No code checks the instruction set per value: each plan stores it when it is compiled. One set of functions or the
//! other reads a whole array or row of scalars at once, and both yield the same results.

/// An instruction set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Isa {
    /// The baseline that the compiler assumes.
    #[default]
    Portable,
    /// AVX2 and the related bit manipulation instructions, on processors that execute them fast.
    #[cfg(target_arch = "x86_64")]
    Avx2(crate::x86::Avx2),
}

impl Isa {
    /// Returns the best instruction set that this processor supports.
    pub(crate) fn best() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = crate::x86::Avx2::detect() {
            return Isa::Avx2(avx2);
        }
        Isa::Portable
    }

    /// Returns all instruction sets that this processor supports.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Isa> {
        let mut all = vec![Isa::Portable];
        all.extend((Isa::best() != Isa::Portable).then(Isa::best));
        all
    }
}
