//! Memory that several processes share.
//!
//! It is an anonymous file (`memfd_create`), so a killed process leaves nothing in any file system. Each process maps
//! the whole file once, at a different address, so processes exchange offsets instead of addresses. The file has the
//! maximum size that may ever be needed, but takes memory only for [committed](SharedMemory::commit) ranges.
//!
//! If a mapped file is truncated, or the system has no memory for a page, accessing it kills the process (SIGBUS). So
//! the file is sealed against changes of its size. Pages are committed before any other process learns about them. A
//! lack of memory is then an error that the process which requested it can handle.
//!
//! Threads of one process need no file: [`SharedMemory::private`] provides the same without one.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

use crate::page_size;

/// Memory that is mapped into several processes, or only into this one.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    #[cfg(target_os = "linux")]
    file: Option<std::os::fd::OwnedFd>,
}

// SAFETY: it is an address range that stays mapped until it is dropped. Code that uses the bytes must prevent
// concurrent writes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Address of the first byte, which is page-aligned.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Mapped bytes. Only committed bytes may be accessed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes are mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the offset and length of the whole pages of a range, if all of it is mapped.
    fn pages(&self, offset: usize, len: usize) -> io::Result<(u64, u64)> {
        let end = offset
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(page_size()));
        match end {
            Some(end) if end <= self.len && offset.is_multiple_of(page_size()) => {
                Ok((offset as u64, (end - offset) as u64))
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
mod system {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::ptr::null_mut;

    use rustix::fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate, memfd_create,
    };
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
    use rustix::process::{Resource, getrlimit};

    use super::*;

    const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

    impl SharedMemory {
        /// Creates memory of `len` bytes, rounded up to pages. No page is committed.
        ///
        /// # Errors
        ///
        /// Returns the system's error: no memory, no address space, too many open files, or the file would be too
        /// large.
        pub fn create(len: usize) -> io::Result<Self> {
            let len = rounded(len)?;
            // Otherwise, the system would send a signal that terminates the process.
            if getrlimit(Resource::Fsize)
                .current
                .is_some_and(|most| (len as u64) > most)
            {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            let file = memfd_create("fastpipe", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, len as u64)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            SharedMemory::map(file, len)
        }

        /// Maps the memory of another process from its file.
        ///
        /// # Errors
        ///
        /// Returns the system's error, and `InvalidInput` if the size of the file may change.
        pub fn open(file: OwnedFd) -> io::Result<Self> {
            let sealed =
                rustix::fs::fcntl_get_seals(&file).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            if !sealed.contains(SealFlags::SHRINK) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let len =
                usize::try_from(fstat(&file)?.st_size).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            SharedMemory::map(file, len)
        }

        fn map(file: OwnedFd, len: usize) -> io::Result<Self> {
            // SAFETY: these are new pages at an address that the system chooses, so no existing memory is replaced.
            let found = unsafe {
                mmap(
                    null_mut(),
                    len,
                    ACCESS,
                    MapFlags::SHARED | MapFlags::NORESERVE,
                    &file,
                    0,
                )
            }?;
            SharedMemory::of(found.cast(), len, Some(file))
        }

        /// Creates memory that only this process uses.
        ///
        /// # Errors
        ///
        /// Returns the system's error if there is not enough address space.
        pub fn private(len: usize) -> io::Result<Self> {
            let len = rounded(len)?;
            // SAFETY: as in `map`.
            let found = unsafe { mmap_anonymous(null_mut(), len, ACCESS, MapFlags::PRIVATE | MapFlags::NORESERVE) }?;
            SharedMemory::of(found.cast(), len, None)
        }

        fn of(start: *mut u8, len: usize, file: Option<OwnedFd>) -> io::Result<Self> {
            let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(SharedMemory { start, len, file })
        }

        /// The file, to be passed to other processes; `None` if the memory is private.
        pub fn file(&self) -> Option<BorrowedFd<'_>> {
            self.file.as_ref().map(AsFd::as_fd)
        }

        /// Commits memory for a range that begins at a page boundary. Pages that are already committed are unchanged.
        ///
        /// # Errors
        ///
        /// Returns the system's error if there is not enough memory, and `InvalidInput` if the range isn't mapped.
        pub fn commit(&self, offset: usize, len: usize) -> io::Result<()> {
            let (offset, len) = self.pages(offset, len)?;
            match &self.file {
                Some(file) if len > 0 => Ok(rustix::io::retry_on_intr(|| {
                    fallocate(file, FallocateFlags::empty(), offset, len)
                })?),
                _ => Ok(()),
            }
        }

        /// Releases the memory of a range that begins at a page boundary to the system. It must be committed again
        /// before use.
        ///
        /// # Errors
        ///
        /// Returns `InvalidInput` if the range isn't mapped.
        pub fn forget(&self, offset: usize, len: usize) -> io::Result<()> {
            let (at, size) = self.pages(offset, len)?;
            match &self.file {
                Some(file) if size > 0 => Ok(fallocate(
                    file,
                    FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                    at,
                    size,
                )?),
                None if size > 0 => {
                    // SAFETY: the range is within the mapping, and the caller guarantees that no code uses the memory.
                    Ok(unsafe {
                        madvise(
                            self.start.as_ptr().add(offset).cast(),
                            size as usize,
                            Advice::LinuxDontNeed,
                        )
                    }?)
                }
                _ => Ok(()),
            }
        }

        /// Bytes of the file that take memory; 0 if the memory is private.
        pub fn committed(&self) -> u64 {
            self.file
                .as_ref()
                .and_then(|file| fstat(file).ok())
                .map_or(0, |stat| stat.st_blocks as u64 * 512)
        }
    }

    impl Drop for SharedMemory {
        fn drop(&mut self) {
            // SAFETY: `of` received this range, and no code uses it anymore.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }

    fn rounded(len: usize) -> io::Result<usize> {
        let len = len.max(1).checked_next_multiple_of(page_size());
        len.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod system {
    use super::*;

    const WHY: &str = "shared memory requires Linux";

    impl SharedMemory {
        /// Not supported on this system.
        ///
        /// # Errors
        ///
        /// Always `Unsupported`.
        pub fn create(_len: usize) -> io::Result<Self> {
            Err(io::Error::new(io::ErrorKind::Unsupported, WHY))
        }

        /// Not supported on this system.
        ///
        /// # Errors
        ///
        /// Always `Unsupported`.
        pub fn private(_len: usize) -> io::Result<Self> {
            Err(io::Error::new(io::ErrorKind::Unsupported, WHY))
        }

        /// Not supported on this system.
        ///
        /// # Errors
        ///
        /// Always `Unsupported`.
        pub fn commit(&self, offset: usize, len: usize) -> io::Result<()> {
            self.pages(offset, len)?;
            Err(io::Error::new(io::ErrorKind::Unsupported, WHY))
        }

        /// Not supported on this system.
        ///
        /// # Errors
        ///
        /// Always `Unsupported`.
        pub fn forget(&self, offset: usize, len: usize) -> io::Result<()> {
            self.commit(offset, len)
        }

        /// Always 0 on this system.
        pub fn committed(&self) -> u64 {
            0
        }
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// # Safety
    ///
    /// The range is committed, and no other code uses it while the reference exists.
    #[allow(clippy::mut_from_ref, reason = "the file owns the bytes")]
    unsafe fn bytes(memory: &SharedMemory, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= memory.len());
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(memory.start().as_ptr().add(offset), len) }
    }

    #[test]
    fn mappings_share_their_content() {
        let page = page_size();
        let here = SharedMemory::create(1 << 40).unwrap();
        let there = SharedMemory::open(here.file().unwrap().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!((here.len(), there.len()), (1 << 40, 1 << 40));
        assert_ne!(here.start(), there.start());
        here.commit(7 * page, 3 * page - 5).unwrap();
        assert_eq!(here.committed(), 3 * page as u64);
        // SAFETY: the range is committed, and this is the only thread that uses it.
        unsafe {
            assert!(bytes(&there, 7 * page, 3 * page).iter().all(|&byte| byte == 0));
            bytes(&here, 8 * page, 10).fill(7);
            assert_eq!(bytes(&there, 8 * page, 11), [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
        }
        here.forget(7 * page, 2 * page).unwrap();
        assert_eq!(there.committed(), page as u64);
        there.commit(7 * page, 2 * page).unwrap();
        // SAFETY: as above.
        let again = unsafe { bytes(&here, 7 * page, 2 * page) };
        assert!(again.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn unmapped_ranges_are_refused() {
        let page = page_size();
        for memory in [
            SharedMemory::create(10 * page).unwrap(),
            SharedMemory::private(10 * page).unwrap(),
        ] {
            for (offset, len) in [
                (1, 1),
                (10 * page, 1),
                (9 * page, page + 1),
                (0, usize::MAX),
                (page, usize::MAX),
            ] {
                assert!(memory.commit(offset, len).is_err(), "{offset} {len}");
                assert!(memory.forget(offset, len).is_err(), "{offset} {len}");
            }
            memory.commit(9 * page, page).unwrap();
            memory.commit(10 * page, 0).unwrap();
            memory.forget(0, 10 * page).unwrap();
        }
        assert!(SharedMemory::create(usize::MAX).is_err());
        assert!(SharedMemory::private(usize::MAX).is_err());
    }

    #[test]
    fn a_file_that_can_be_truncated_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(SharedMemory::open(file.as_fd().try_clone_to_owned().unwrap()).is_err());
        let memory = SharedMemory::create(1 << 20).unwrap();
        let cut = std::fs::File::from(memory.file().unwrap().try_clone_to_owned().unwrap());
        assert!(cut.set_len(0).is_err() && cut.set_len(2 << 20).is_err());
    }

    #[test]
    fn private_memory_is_discarded() {
        let memory = SharedMemory::private(1 << 40).unwrap();
        memory.commit(0, 1 << 20).unwrap();
        // SAFETY: private memory needs no commit, and this is the only thread that uses it.
        unsafe {
            bytes(&memory, 0, 1 << 20).fill(3);
            memory.forget(0, 1 << 20).unwrap();
            assert!(bytes(&memory, 0, 1 << 20).iter().all(|&byte| byte == 0));
        }
        assert_eq!((memory.committed(), memory.file().is_none()), (0, true));
    }
}
